"""The bugs that `tests.mutants` makes on purpose in recovery from failures, followers, replicas and processes."""

from tests.mutants_made import Mutant

REPLICAS = "tests/test_replicas.py"
FAILURES = "tests/test_engine_failures.py"
FOLLOWERS = "tests/test_engine_followers.py"
REQUESTS = "tests/test_engine_requests.py"

MUTANTS_OF_GROUPS = [
    Mutant(
        "processes: all get signals",
        "examples/server/processes.py",
        "for process in processes[:1]:",
        "for process in processes:",
        "tests/test_serve_processes.py",
    ),
    Mutant(
        "processes: a terminal's signals reach them all",
        "examples/server/processes.py",
        "start_new_session=True",
        "start_new_session=False",
        "tests/test_serve_processes.py",
    ),
    Mutant(
        "processes: all have the first device",
        "examples/server/processes.py",
        '"JAX_LOCAL_DEVICE_IDS": str(index)',
        '"JAX_LOCAL_DEVICE_IDS": "0"',
        "tests/test_serve_processes.py",
    ),
    Mutant(
        "processes: one that fails does not end the others",
        "examples/server/processes.py",
        "            process.kill()\n            process.wait()\n",
        "            pass\n",
        "tests/test_serve_processes.py",
    ),
    Mutant(
        "engine: calls go on after a failure",
        "engine/base.py",
        """        if call != "reset":
            self._check_alive()
""",
        "",
        FAILURES,
    ),
    Mutant(
        "engine: Ctrl-C is no failure",
        "engine/base.py",
        """        self._failure = f"{call} did not end"
        try:
            yield
        except BaseException as error:""",
        """        try:
            yield
        except Exception as error:""",
        FAILURES,
    ),
    Mutant("engine: a generate that raises leaves its requests", "engine/base.py", "self._drop(ids)", "pass", FAILURES),
    Mutant(
        "engine: what ends a failed stream hides its error",
        "engine/base.py",
        "if not self.has_failed and self.is_unfinished(request_id):",
        "if self.is_unfinished(request_id):",
        FAILURES,
    ),
    Mutant("engine: followers ignore cancel", "engine/processes.py", "engine.cancel(arguments[0])", "pass", FOLLOWERS),
    Mutant(
        "engine: a follower's process dies of a failed step",
        "engine/processes.py",
        "    except Exception as error:\n        _LOGGER",
        "    except ValueError as error:\n        _LOGGER",
        FOLLOWERS,
    ),
    Mutant(
        "engine: a follower leaves an idle leader",
        "engine/processes.py",
        "leader.settimeout(None)",
        "leader.settimeout(timeout_seconds)",
        FOLLOWERS,
    ),
    Mutant(
        "engine: a leader goes on without one of its followers' programs",
        "engine/processes.py",
        """if report["num_started"] != self._runner.num_started:""",
        "if False:",
        FOLLOWERS,
    ),
    Mutant(
        "replicas: what is over is kept",
        "engine/replicas.py",
        "del self._placed[request_id], replica.request_ids[delta.request_id]",
        "del self._placed[request_id]",
        REPLICAS,
    ),
    Mutant(
        "replicas: stats waits",
        "engine/replicas.py",
        "if replica.is_idle:\n                    replica.settle()\n        return",
        "if True:\n                    replica.settle()\n        return",
        REPLICAS,
    ),
    Mutant(
        "replicas: tokens of the others are lost with a failure",
        "engine/replicas.py",
        "            if deltas:\n                return deltas",
        "            if False:\n                return deltas",
        REPLICAS,
    ),
    Mutant(
        "replicas: an engine that failed is not reset",
        "engine/replicas.py",
        "            fresh.engine.reset()\n",
        "            pass\n",
        REPLICAS,
    ),
    Mutant(
        "replicas: requests go to engines that are lost",
        "engine/replicas.py",
        "(replica for replica in self._replicas if not replica.is_lost)",
        "self._replicas",
        REPLICAS,
    ),
    Mutant(
        "replicas: a cancelled request counts as one sample",
        "engine/replicas.py",
        "replica.num_unfinished -= placed.num_unfinished",
        "replica.num_unfinished -= 1",
        REPLICAS,
    ),
    Mutant(
        "engine: half of a refused batch is added",
        "engine/base.py",
        "            self.check(prompt, wanted)\n",
        "            self.check(prompts[0], wanted)\n",
        FAILURES,
    ),
    Mutant(
        "engine: a leader goes on after half a line",
        "engine/processes.py",
        "        except BaseException:  # a part",
        "        except Exception:  # a part",
        FOLLOWERS,
    ),
    Mutant(
        "replicas: a request counts as one sample",
        "engine/replicas.py",
        "replica.num_unfinished += params.n",
        "replica.num_unfinished += 1",
        REPLICAS,
    ),
    Mutant(
        "engine: leaving a stream goes on with its request",
        "engine/base.py",
        "            self._drop([request_id])\n",
        "            pass\n",
        REQUESTS + " -k leaving",
    ),
    Mutant(
        "engine: a reset takes the reports of the one before",
        "engine/processes.py",
        'while report.get("reset") != self._num_resets:',
        'while "reset" not in report:',
        FOLLOWERS,
    ),
    Mutant(
        "replicas: the largest engine says what fits",
        "engine/replicas.py",
        "return min(replica.engine.check(prompt, params)",
        "return max(replica.engine.check(prompt, params)",
        REPLICAS,
    ),
    Mutant(
        "replicas: stats asks an engine that is lost",
        "engine/replicas.py",
        "and self.error is None and not self.is_lost",
        "and self.error is None",
        REPLICAS,
    ),
    Mutant(
        "engine: a leader's followers go on after its end",
        "engine/processes.py",
        "    def __exit__(self, *_: object) -> None:\n        self.close()",
        "    def __exit__(self, *_: object) -> None:\n        pass",
        "tests/test_engine_edges.py -k connections",
    ),
    Mutant(
        "engine: a follower's failed reset is none of its leader's",
        "engine/processes.py",
        """            if report["failure"]:
                raise RuntimeError(f"follower {index} has failed: {report['failure']}")
            if""",
        "            if",
        "tests/test_engine_edges.py -k leader_s_reset",
    ),
    Mutant(
        "engine: a follower that is silent has reported",
        "engine/processes.py",
        '                raise TimeoutError(f"it has not answered for {timeout_seconds} s")',
        "                return {}",
        "tests/test_engine_edges.py -k for_ever",
    ),
    Mutant(
        "engine: a follower that has failed reports each call",
        "engine/processes.py",
        '    if engine.has_failed and call != "reset":\n        return None\n',
        "    if False:\n        return None\n",
        "tests/test_engine_edges.py -k makes_no_call",
    ),
    Mutant(
        "engine: the widest group's room on the host is all groups'",
        "engine/pools.py",
        "if any(len(manager.table(seat)) > len(manager.free_host_blocks) for manager in self.managers):",
        "if len(self._widest.table(seat)) > len(self._widest.free_host_blocks):",
        "tests/test_engine_edges.py -k agree",
    ),
    Mutant(
        "engine: groups of layers agree on the last one's blocks",
        "engine/pools.py",
        "count, agreed = found, agreed + 1 if found == count else 1",
        "count, agreed = found, agreed + 1",
        "tests/test_engine_edges.py -k agree",
    ),
    Mutant(
        "engine: a sequence needs what it holds once more",
        "engine/blocks.py",
        "return np.minimum(num_blocks, self.most_held - self.held_for(num_computed))",
        "return np.minimum(num_blocks, self.most_held)",
        "tests/test_engine_edges.py -k bounds_the_blocks",
    ),
]
