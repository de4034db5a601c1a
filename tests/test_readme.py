"""The README's code runs, its commands name what exists, and its links lead somewhere."""

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def command(name):
    return re.search(rf"<!-- {name} command -->\n```bash\n(.*?)\n```", README, re.DOTALL).group(1)


def test_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(4, 8, 64) [1 1 1 1] True\n"


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


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_op_table_lists_every_public_name():
    listed = set(re.findall(r"`(\w+)`", README))
    init = ast.parse((ROOT / "paged_jax" / "__init__.py").read_text())
    public = {alias.asname for node in init.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert public
    assert public - listed == set()
