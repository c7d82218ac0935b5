"""The paper's README names each experiment once, and how long the one takes that is minutes without a GPU."""

from __future__ import annotations

import re

from gpu_accel.workbench import registry


def test_every_experiment_has_one_row():
    paper = registry.paper("transformer_engine")
    text = (paper.path / "README.md").read_text(encoding="utf-8")
    table = text.split("| experiment |")[1].split("\n\n")[0]
    rows = dict(found := re.findall(r"^\| `(\w+)` \| (.*) \|$", table, flags=re.M))
    assert sorted(name for name, _ in found) == sorted(paper.experiments)
    assert "minutes" in rows["perplexity"]
