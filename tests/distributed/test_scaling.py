"""The scaling benchmark runs on a CPU, and its model of larger machines adds up."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bc_diffusers.attention import ulysses
from bc_diffusers.attention.ulysses import UlyssesGroup


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("bench_scaling")


@pytest.fixture
def model(bench):
    return importlib.import_module("scaling_model")


def test_one_process_then_the_prediction(bench, tmp_path, capsys):
    rows_file = tmp_path / "rows.json"
    bench.main(["--model", "tiny", "tiny-attention", "--device", "cpu", "--chunks", "2", "--json", str(rows_file)])
    rows = json.loads(rows_file.read_text())
    assert [(r["model"], r["ranks"], r["ulysses"]) for r in rows] == [("tiny", 1, 1), ("tiny-attention", 1, 1)]
    assert all(r["ms_per_chunk"] > 0 and r["cache_bytes"] > 0 for r in rows)
    capsys.readouterr()
    bench.main(["--model", "tiny", "--simulate", "--measured", str(rows_file)])
    lines = capsys.readouterr().out.splitlines()
    assert f"predicted from {rows[0]['ms_per_chunk']:.1f} ms a chunk on one GPU" in lines[0]
    assert lines[2].split()[:4] == ["1", "1", "1", f"{rows[0]['ms_per_chunk']:.1f}"]
    assert all(4 % int(line.split()[2]) == 0 for line in lines[2:])  # the degrees that divide 4 heads


def test_what_one_rank_pays(bench, tmp_path, capsys):
    assert not torch.distributed.is_initialized()
    bench.main(["--model", "tiny", "tiny-attention", "--device", "cpu", "--chunks", "2", "--overhead", "--json",
                str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    ways = ["no parallelism", "ulysses 1", "exchange with itself"]
    assert [(r["model"], r["way"]) for r in rows] == [(m, w) for m in ("tiny", "tiny-attention") for w in ways]
    assert all(r["ms_per_chunk"] > 0 and len(r["rounds"]) == 3 for r in rows)
    assert "no parallelism" in capsys.readouterr().out and not torch.distributed.is_initialized()


def test_without_a_measurement_nothing_is_predicted(bench, tmp_path):
    with pytest.raises(SystemExit, match="--measured FILE"):
        bench.main(["--model", "wan-14b", "--simulate"])
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(SystemExit, match="no one-GPU row of wan-14b"):
        bench.main(["--model", "wan-14b", "--simulate", "--measured", str(tmp_path / "rows.json")])


def test_one_rank_costs_what_was_measured(bench, model):
    machine = model.Machine(8, model.Link(300, 20), model.Link(40, 40), 3500)
    for geometry in bench.GEOMETRIES.values():
        assert model.predict(geometry, 100.0, 1, machine) == model.Prediction(pytest.approx(100.0), 0.0)


def test_links_without_limits_leave_only_what_every_rank_repeats(bench, model):
    endless = model.Link(float("inf"), 0)
    machine = model.Machine(8, endless, endless, float("inf"))
    assert model.predict(bench.GEOMETRIES["cosmos3-attention"], 80.0, 8, machine).milliseconds == pytest.approx(10.0)
    geometry = bench.GEOMETRIES["wan-14b"]
    total, repeated = model.work(geometry)
    want = 80.0 * (repeated + (total - repeated) / 8) / total
    assert model.predict(geometry, 80.0, 8, machine).milliseconds == pytest.approx(want)
    assert 0 < repeated / total < 0.05


def test_sending_between_nodes_takes_longer(bench, model):
    machine = model.Machine(4, model.Link(300, 20), model.Link(40, 40), 3500)
    assert model.sending_seconds(10**6, 1, machine) == 0
    # Half of what a rank holds goes to the other one.
    assert model.sending_seconds(6 * 10**8, 2, machine) == pytest.approx(1e-3 + 20e-6)
    # Half goes to the other node's four ranks.
    assert model.sending_seconds(8 * 10**7, 8, machine) == pytest.approx(1e-3 + 40e-6)


@pytest.mark.parametrize("name, degree", [("wan-1.3b", 2), ("wan-14b", 8), ("cosmos3-attention", 4)])
def test_exchanged_bytes_are_those_of_the_exchange(bench, model, name, degree):
    geometry, sizes = bench.GEOMETRIES[name], []

    def record(received, sent, group):
        sizes.append(sent.numel() * sent.element_size())

    rows = -(-geometry.tokens // degree)
    q, k = (torch.empty(1, rows, heads, geometry.head_dim, dtype=torch.bfloat16, device="meta")
            for heads in (geometry.heads, geometry.kv_heads))
    with mock.patch.object(ulysses, "dist", SimpleNamespace(all_to_all_single=record)):
        group = UlyssesGroup(None, degree, 0)
        out, _, _ = group.exchange_qkv(q, k, k, geometry.tokens)
        group.exchange_output(out, rows)
    assert tuple(sizes) == model.exchanged_bytes(geometry, degree)
