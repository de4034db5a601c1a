"""Tests the documents: code runs, commands name existing things, and figures equal the files' values."""

import fnmatch
import importlib
import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from benchmarks import cases, harness, mla_cases, report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "benchmarks/README.md")
LINKING = (".github/CONTRIBUTING.md", "paged_jax/kernels/README.md", "benchmarks/LOG.md", "tests/README.md")
CITING = (*DOCUMENTS, "benchmarks/LOG.md")  # the documents that say what a result shows
# The columns of the decode tables, each with the contender whose times it holds.
CONTENDERS = {
    "us": "auto",
    "auto, us": "auto",
    "FlashInfer 0.5.3": ("flashinfer", "flashinfer-xqa"),  # the faster of them
    "FlashInfer decode": "flashinfer",
    "XQA": "flashinfer-xqa",
    "cuDNN": "cudnn",
    "JAX's op": "pallas",
    "XLA": "xla-gather",
    "v2, partitions of 2048": "v2/2048",
}
FLASHINFERS = "flashinfer", "flashinfer-fa2", "flashinfer-fa3", "flashinfer-batch", "flashinfer-pod"
RAGGED_CONTENDERS = {  # where they are others
    "FlashInfer 0.5.3": FLASHINFERS,  # the fastest of them
    "FlashInfer decode": "flashinfer",
    "fa2": "flashinfer-fa2",
    "fa3": "flashinfer-fa3",
    "batch": "flashinfer-batch",
    "POD": "flashinfer-pod",
    "JAX's op": "attention_mgpu",
    "`attention_mgpu`": "attention_mgpu",
    "cuDNN, contiguous": "cudnn-contiguous",
    "ours": "auto",
    "with `max_query_len`": "auto/bounded",
    "by Mosaic GPU": "mosaic_gpu",
    "by Triton": "triton",
}


def command(name):
    return re.search(rf"<!-- {name} command -->\n```bash\n(.*?)\n```", README, re.DOTALL).group(1)


def run_example():
    """Runs the README's first example and gives the names that it defines."""
    code, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_example_runs(capsys):
    run_example()
    assert capsys.readouterr().out == "(4, 8, 64) [1 1 1 1] True\n"


def test_example_for_several_gpus_runs_where_the_arrays_lie():
    names = run_example()
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), names)
    assert {shard.data.shape for shard in names["key_cache"].addressable_shards} == {(64, 1, 16, 64)}
    assert {shard.data.shape for shard in names["out"].addressable_shards} == {(1, 4, 64)}
    np.testing.assert_allclose(np.asarray(names["out"], np.float32), 1)  # the mean of values that are all 1


def test_example_copies_what_a_fork_shares():
    names = run_example()
    allocator, decode_step = names["allocator"], names["decode_step"]
    blocks = allocator.free(names["blocks"], jnp.array([False, True, False, False]))
    blocks = allocator.fork(blocks, 0, 1)
    shared = jnp.arange(64)[:, None, None, None] == blocks.block_tables[0, 0]
    # All other blocks are poison, so that the test sees whether the block was copied.
    cache = jax.tree.map(lambda pool: jnp.where(shared, pool, jnp.nan).astype(pool.dtype), names["cache"])
    new = jnp.broadcast_to(jnp.arange(7, 11, dtype=jnp.bfloat16)[:, None, None], (4, 2, 64))
    _, cache, blocks, ok = decode_step(names["query"], new, new, cache, blocks)
    assert ok
    tables = np.asarray(blocks.block_tables)
    assert tables[0, 0] != tables[1, 0]
    for seq in (0, 1):  # the token before the fork, then the sequence's own token
        tokens = np.asarray(cache.key_cache, np.float32)[tables[seq, 0], 0, :2, 0]
        assert tokens.tolist() == [1, 7 + seq]


def test_main_command_generates(monkeypatch, capsys):
    from examples.generate import main

    arguments = shlex.split(command("main"))
    arguments = arguments[arguments.index("examples.generate") + 1 :]
    monkeypatch.setattr("sys.argv", ["generate", *arguments])
    assert not main()
    assert len(capsys.readouterr().out) > 100


def test_ci_runs_the_test_command():
    assert "pytest" in command("test")
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize("document", [*DOCUMENTS, *LINKING])
def test_links_lead_somewhere(document):
    file = ROOT / document
    links = re.findall(r"\]\(([^):]+)\)", file.read_text())
    assert links
    for link in links:
        target, _, anchor = link.partition("#")
        there = file.parent / target if target else file
        assert there.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_results_are_those_that_documents_cite(folder):
    cited = {
        (file.parent / link).resolve()
        for file in map(ROOT.joinpath, CITING)
        for link in re.findall(r"\]\(([\w./-]*results/[\w.-]+)\)", file.read_text())
    }
    there = ROOT / folder / "results"
    assert set(there.iterdir()) == {file for file in cited if file.parent == there}


def test_code_cites_headings_of_the_log():
    """A citation is `LOG, "Heading"`, or the bold name with which a paragraph begins."""
    names = set(
        re.findall(r"^(?:#+ |- \*\*)(.*?)\.?(?:\*\*.*)?$", (ROOT / "benchmarks/LOG.md").read_text(), re.MULTILINE)
    )
    cited = set()
    for folder in ("paged_jax", "examples", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s+(# )?", " ", file.read_text())
            for found in re.findall(r'LOG(?:\.md)?, ("[^"]+"(?:,? and "[^"]+")*)', text):
                cited |= {(str(file.relative_to(ROOT)), name) for name in re.findall(r'"([^"]+)"', found)}
    assert len(cited) > 20
    assert {citation for citation in cited if citation[1] not in names} == set()


def test_the_map_of_the_tests_names_every_file():
    names = re.findall(r"`([\w*./]+)`", (ROOT / "tests" / "README.md").read_text())
    for file in (ROOT / "tests").rglob("*.py"):
        name = file.relative_to(ROOT / "tests").as_posix()
        named = any(name.startswith(n) if n.endswith("/") else fnmatch.fnmatch(name, n) for n in names)
        assert named or file.name == "__init__.py", f"tests/README.md does not name {name}"


def test_documents_are_short():
    assert len(README.splitlines()) < 150
    assert len((ROOT / "benchmarks" / "LOG.md").read_text().splitlines()) <= 800


def test_op_table_lists_every_public_name():
    listed = set(re.findall(r"`(\w+)`", README))
    assert set(paged_jax.__all__) - listed == set()


def compare_with_file(document, op, of_op, contenders):
    """Compares every row of a document's tables that begins with a case of an op, rounded as `benchmarks.report` does.

    Returns how many cases it has found.
    """
    text = (ROOT / document).read_text()
    (file,) = set(re.findall(rf"results/([\w-]+-h200-{op}\.json)", text))
    found = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    by_name = {case.name: case for case in of_op}
    checked, header = set(), []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(("| case", "| batch", "| after")):
            header = cells
        name = re.match(r"\| `([\w-]+)`", line)
        if name is None or "share" not in header or name.group(1) not in by_name:
            continue
        case = by_name[name.group(1)]
        ours = rows[case.name, "auto"]
        expected = {
            "heads/kv heads": f"{case.num_heads}/{case.num_kv_heads}",
            "share": f"{report.share(ours):.0%}",
            "TFLOP/s": f"{case.seen_flops / ours['us'] / 1e6:.0f}",
        }
        for column, cell in zip(header[1:], cells[1:], strict=True):
            names = contenders.get(column, ())
            timed = [rows.get((case.name, name), {}) for name in ([names] if isinstance(names, str) else names)]
            times = [row["us"] for row in timed if "us" in row]
            time = report.number(min(times)) if times else "-"
            assert cell == expected.get(column, time), (case.name, column)
        checked.add(case.name)
    return len(checked)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_speeds_are_what_the_files_say(document):
    decode = compare_with_file(document, "decode", cases.DECODE, CONTENDERS)
    ragged = compare_with_file(document, "ragged", cases.RAGGED, CONTENDERS | RAGGED_CONTENDERS)
    assert (decode, ragged) == ((10, 3) if document == "README.md" else (len(cases.DECODE), len(cases.RAGGED)))


def test_rates_after_a_pause_are_what_the_file_says():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    (file,) = set(re.findall(r"results/([\w-]+-h200-ragged\.json)", text))
    found = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    by_name = {case.name: case for case in cases.RAGGED}
    _, table = text.split("| after a pause, TFLOP/s |")
    header, _, *lines = ("|" + table).split("\n\n")[0].splitlines()
    columns = [(CONTENDERS | RAGGED_CONTENDERS)[cell.strip()] for cell in header.strip("|").split("|")]
    for line in lines:
        name, *rates = (cell.strip(" `") for cell in line.strip("|").split("|"))
        times = [rows.get((name, column), {}).get("rested_us") for column in columns]
        assert rates == [f"{by_name[name].seen_flops / us / 1e6:.0f}" if us else "-" for us in times], name
    assert len(lines) == 8


def test_times_beside_fa3_are_what_the_file_says():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    files = set(re.findall(r"results/([\d-]+h\d+-ragged-fa3-[\w-]+\.json)", text))
    rows = [row for file in files for row in json.loads((ROOT / "benchmarks" / "results" / file).read_text())["rows"]]
    times = {(row["case"], row["contender"]): report.number(row["us"]) for row in rows if "us" in row}
    _, table = text.split("| ragged batch |")
    lines = ("|" + table).split("\n\n")[0].splitlines()[2:]
    contenders = "auto", "auto/bounded", "vllm-fa3", "vllm-fa3-128"
    for line in lines:
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        assert cells == [times.get((name, contender), "-") for contender in contenders], name
    assert {line.split("`")[1] for line in lines} == {case.name for case in (*cases.RAGGED, *cases.MORE_RAGGED)}


def test_times_of_latent_attention_are_what_the_file_says():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    (file,) = set(re.findall(r"results/([\d-]+h\d+-mla\.json)", text))
    found = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    times = {(row["case"], row["contender"]): report.number(row["us"]) for row in found["rows"] if "us" in row}
    _, table = text.split("| latents |")
    lines = ("|" + table).split("\n\n")[0].splitlines()[2:]
    for line in lines:
        name, us, before, _, _, *peers = (cell.strip(" `") for cell in line.strip("|").split("|"))
        contenders = "mosaic_gpu", "mosaic_gpu before", "flash-mla", "vllm-fa3"
        assert [us, before, *peers] == [times.get((name, contender), "-") for contender in contenders], name
    assert [line.split("`")[1] for line in lines] == [case.name for case in mla_cases.CASES]


def test_commands_of_the_benchmarks_exist():
    commands = re.findall(r"`python -m (benchmarks\.\w+)([^`]*)`", (ROOT / "benchmarks" / "README.md").read_text())
    modules = {name.removeprefix("benchmarks.") for name, _ in commands}
    there = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert there <= modules, "a benchmark that the document does not name"
    for name, arguments in commands:
        module = importlib.import_module(name)
        if hasattr(module, "BENCHMARK"):
            harness._arguments(module.BENCHMARK, shlex.split(arguments))
