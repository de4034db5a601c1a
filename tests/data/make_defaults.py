"""Writes real/defaults.json: what transformers takes for each field that a config.json of a tiny model leaves out.

    pip install transformers==5.24.0      (not a dependency of the tests; PyTorch is not needed)
    python tests/data/make_defaults.py

There is one file of each kind of model. Fields without a default, or whose absence transformers refuses, are left out.
"""

import json
from pathlib import Path

from transformers import CONFIG_MAPPING

HERE = Path(__file__).parent


def main() -> None:
    """Writes the file."""
    defaults: dict[str, dict] = {}
    kinds: set[str] = set()
    for path in sorted(HERE.glob("*.json")):
        config = json.loads(path.read_text())["config"]
        kind = config.pop("model_type")
        if kind in kinds:
            continue
        kinds.add(kind)
        found = defaults[path.stem] = {}
        for field in sorted(config):
            given = {name: value for name, value in config.items() if name != field}
            try:
                whole = CONFIG_MAPPING[kind](**given).to_dict()
            except Exception:  # transformers validates what depends on the field
                continue
            if field in whole:
                found[field] = whole[field]
    (HERE / "real" / "defaults.json").write_text(json.dumps(defaults, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
