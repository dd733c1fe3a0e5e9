"""README names everything that can be set and switched off."""

from pathlib import Path

import passes
from compile_overlap import config

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_every_setting_has_its_row():
    missing = [name for name in (*config.VARIABLES, config.PLANS) if f"\n| `{name}` |" not in README]
    assert not missing


def test_every_pass_has_its_row():
    missing = [name for name in passes.PASS_NAMES if f"\n| `{name}` |" not in README]
    assert not missing


def test_the_settings_table_of_the_module_is_whole():
    assert not [name for name in config.VARIABLES if f"| `{name}`" not in config.__doc__]
