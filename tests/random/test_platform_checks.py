"""Secure mode looks at the machine's arithmetic before it draws noise, and says which fact does not hold."""

import ctypes
import ctypes.util
import os
import platform as machine
import sys
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.random import platform_checks
from shoal.random.platform_checks import require_platform
from shoal.random.secure_streams import SecureStreams

UP_AND_DOWN = {"x86_64": (0x800, 0x400, 0xC00), "aarch64": (0x400000, 0x800000, 0xC00000)}  # fenv.h


def test_this_machine_will_do():
    require_platform()


@pytest.mark.parametrize("start", [require_platform, SecureStreams])
def test_flush_to_zero_is_found(start):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to 0")
    try:
        with pytest.raises(ConfigError, match=r"flush-to-zero.*torch.set_flush_denormal\(False\)"):
            start()
    finally:
        torch.set_flush_denormal(False)
    start()


@pytest.mark.skipif(machine.machine() not in UP_AND_DOWN, reason="the modes' numbers are not known here")
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["up", "down", "towards zero"])
def test_another_rounding_mode_is_found(mode):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    assert libm.fesetround(UP_AND_DOWN[machine.machine()][mode]) == 0
    try:
        with pytest.raises(ConfigError, match="does not round to the nearest"):
            require_platform()
    finally:
        assert libm.fesetround(0) == 0
    require_platform()


def test_big_endian_is_found(monkeypatch):
    monkeypatch.setattr(platform_checks, "sys", SimpleNamespace(byteorder="big", float_info=sys.float_info))
    with pytest.raises(ConfigError, match="big-endian"):
        require_platform()


def test_other_floats_are_found(monkeypatch):
    other = SimpleNamespace(mant_dig=64, max_exp=16384, min_exp=-16381)
    monkeypatch.setattr(platform_checks, "sys", SimpleNamespace(byteorder="little", float_info=other))
    with pytest.raises(ConfigError, match="not IEEE binary64"):
        require_platform()


@pytest.mark.parametrize("error", [NotImplementedError, OSError])
def test_a_machine_without_entropy_is_found(monkeypatch, error):
    def none(_count):
        raise error

    monkeypatch.setattr(os, "urandom", none)
    with pytest.raises(ConfigError, match=r"os.urandom gives no entropy; let this process"):
        require_platform()


def test_a_run_in_secure_mode_looks_before_it_begins(tmp_path):
    given = {
        "algorithm": "trusted-curator",
        "model": "linear",
        "rounds": 1,
        "random": "secure",
        "engine.device": "cpu",
    }
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to 0")
    try:
        with pytest.raises(ConfigError, match="flush-to-zero"):
            shoal.run(given, runs=tmp_path)
    finally:
        torch.set_flush_denormal(False)
    assert not list(tmp_path.rglob("ledger.jsonl"))
