"""Every committed record is valid and says where it comes from."""

import json
from pathlib import Path

import pytest
from rankmixer import record

RECORDS = sorted((Path(__file__).resolve().parents[2] / "reports" / "results").rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_record(path):
    content = json.loads(path.read_text())
    record.validate(content)
    assert len(content["environment"]["git_commit"]) == 40


def test_there_are_records():
    assert len(RECORDS) >= 10
