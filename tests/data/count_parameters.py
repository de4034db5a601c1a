"""Checks with transformers how many parameters the models of real/configs.json have.

    python -m tests.data.count_parameters

real/configs.json holds what changes numbers in the config.json of real folders, and how many parameters the models
have, tied ones counted once. Those are public facts; no weights are needed.
"""

import json
from pathlib import Path

import torch
import transformers


def main() -> None:
    for name, found in json.loads((Path(__file__).parent / "real" / "configs.json").read_text()).items():
        model_class = getattr(transformers, found["config"]["architectures"][0])
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(found["config"]))
        buffers = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]  # trained too
        count = sum(tensor.numel() for tensor in [*model.parameters(), *buffers])
        assert count == found["num_parameters"], (name, count)


if __name__ == "__main__":
    main()
