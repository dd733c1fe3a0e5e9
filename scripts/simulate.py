#!/usr/bin/env python3
r"""The layer on modelled machines: what the sequential layer takes, the overlapped one, and what stays exposed.

    python scripts/simulate.py                                    # the standard cases
    python scripts/simulate.py --machine H100 --ranks 16 --cards 4 --transport peers --backward [--path]
    python scripts/simulate.py --standard --json reports/results/simulated/scaling.json
    python scripts/simulate.py --rows                             # chunks of rows where a rank has few tokens
    python scripts/simulate.py --ranks 8 --modes                  # the planner's candidates, as compare.py's --modes

SIMULATED, all of it: by the schedules that the passes follow and the cost model that the planner uses, whose
calibration `scripts/calibrate.py` judges on two H200s. Machines and links that were not at hand have data sheet
values (`compile_overlap/machines.py`); eight ranks and network cards were never measured.

Times are of one RankMixer block, torch 2.11.0, in milliseconds: `none` the sequential layer, `alone` the same without
exchanges, `overlapped` ours with the chunks that the planner takes for that machine, or --chunks. `exchanges` is the
time in which an overlapped layer's exchange runs, `exposed` the part of it without computation, `hidden` the other's
share. `saved` is (none - overlapped) / (none - alone), the whole gain over the exchanges' cost: our kernels' gain is
in it; 0 where exchanges cost nothing. --path lists the critical path of the overlapped layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

from rankmixer import record  # noqa: E402

from compile_overlap import machines, plan  # noqa: E402
from compile_overlap.config import PEERS, Settings  # noqa: E402
from compile_overlap.layout import Layout, require  # noqa: E402
from compile_overlap.machines import GPUS, LINKS, NVLINK, STACKS, Machine  # noqa: E402
from compile_overlap.schedule import Plan  # noqa: E402
from compile_overlap.simulate import Case, Timeline, simulate  # noqa: E402

CALIBRATION = ROOT / "reports" / "results" / "simulated" / "calibration.json"
DEFAULT = (512, 64, 1280, 6)  # B, T, D, k
COLLECTIVES = "collectives"
DIGITS = 9


@dataclass(frozen=True)
class Question:
    """One row: a machine of `P` ranks, a workload, and how the exchanges go."""

    gpu: str
    P: int
    gpus_per_host: int = 8
    link: str = NVLINK.name
    cards: int = 8
    stack: str = machines.COMPILED.name
    transport: str = COLLECTIVES
    training: bool = False
    workload: tuple[int, int, int, int] = DEFAULT
    comm_scale: int = 1
    compute_scale: int = 1
    settings: Settings = Settings()

    @property
    def machine(self) -> Machine:
        return machines.machine(self.gpu, self.link, self.stack, cards=self.cards, gpus_per_host=self.gpus_per_host)

    @property
    def layout(self) -> Layout:
        B, T, D, k = self.workload
        require(T % self.P == 0, "tokens", T, f"a multiple of --ranks {self.P}")
        return Layout(self.P, B, T, D, D * k * self.compute_scale)

    def plan(self) -> Plan:
        """What the layer takes there; through the peers' memory, collectives' chunks where hosts are several."""
        if self.transport == PEERS and self.machine.hosts(self.P) == 1:
            return plan.peer_plan(self.layout, "cuda", self.settings, self.training, 2)
        chosen = plan.ranked_on(self.machine, self.layout, 2, "cuda", self.training, self.settings)[0]
        return replace(chosen, peers=True, reserved_sms=0) if self.transport == PEERS else chosen

    def timeline(self, chosen: Plan | None, exchanged: bool = True) -> Timeline:
        case = Case(self.machine, self.layout, chosen, self.training, comm_scale=self.comm_scale, exchanged=exchanged)
        return simulate(case)


def answer(asked: Question) -> dict[str, Any]:
    """The row of a question, as it is written; times in seconds."""
    chosen = asked.plan()
    none, alone, ours = asked.timeline(None), asked.timeline(None, exchanged=False), asked.timeline(chosen)
    times = {
        "none_s": none.total, "alone_s": alone.total, "unchunked_s": asked.timeline(Plan((asked.layout.L,))).total,
        "overlapped_s": ours.total, "exchanges_s": ours.communication, "exposed_s": ours.exposed,
    }  # fmt: skip
    hosts, cost = asked.machine.hosts(asked.P), none.total - alone.total
    return {
        "machine": asked.gpu, "P": asked.P, "hosts": hosts, "link": asked.link,
        "cards": asked.cards if hosts > 1 else None, "stack": asked.stack, "workload": list(asked.workload),
        "comm_scale": asked.comm_scale, "compute_scale": asked.compute_scale,
        "pass": "forward+backward" if asked.training else "forward",
        "transport": asked.transport, "plan": str(chosen), **_rounded(times),
        "hidden_fraction": round(ours.hidden_fraction, DIGITS),
        "saved_of_exchanges": round((none.total - ours.total) / cost, DIGITS) if cost > 0 else 0.0,
    }  # fmt: skip


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in times.items()}


def standard() -> Iterator[Question]:
    """Groups of two to sixteen ranks of each machine, links from one card to NVLink, both transports and directions."""
    for training in (False, True):
        for gpu in GPUS:
            for transport in (COLLECTIVES, PEERS):
                for P in (2, 4, 8):
                    yield Question(gpu, P, transport=transport, training=training)
                for cards in (1, 2, 4, 8):
                    yield Question(gpu, 16, transport=transport, cards=cards, training=training)
        for P in (2, 4, 8):
            yield Question("H200", P, link=machines.SHARED_MEMORY.name, training=training)
            yield Question("H200", P, P // 2, cards=1, training=training)
        yield Question("H200", 2, link=machines.TCP.name, training=training)
        for P, cards in ((8, 8), (16, 8)):
            yield Question("H200", P, cards=cards, training=training, comm_scale=2)
            yield Question("H200", P, cards=cards, training=training, compute_scale=2)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as text; times in milliseconds."""
    titles = ("none", "alone", "overlapped", "exchanges", "exposed")
    lines = [f"{'machine':<8}{'P':>3}{'hosts':>6}  {'link':<20}{'transport':<12}{'pass':<17}{'chunks':<16}"
             + "".join(f"{title:>11}" for title in titles) + f"{'hidden':>8}{'saved':>8}"]  # fmt: skip
    for row in rows:
        link = row["link"] if row["cards"] is None else f"{row['link'][:6]} + {row['cards']} cards"
        scale = "".join(f" {kind}x{row[f'{kind}_scale']}" for kind in ("comm", "compute") if row[f"{kind}_scale"] > 1)
        times = "".join(f"{row[f'{title}_s'] * 1e3:>11.3f}" for title in titles)
        lines.append(
            f"{row['machine']:<8}{row['P']:>3}{row['hosts']:>6}  {link:<20}{row['transport']:<12}{row['pass']:<17}"
            f"{row['plan'].split()[0]:<16}{times}{row['hidden_fraction']:>8.0%}{row['saved_of_exchanges']:>8.0%}{scale}"
        )
    return "\n".join(lines)


def path(timeline: Timeline) -> str:
    """The critical path: what ran, when in microseconds, and what it waited for."""
    lines = ["critical path of the overlapped layer, us"]
    for i in timeline.critical_path():
        lines.append(f"{i.begin * 1e6:>10.1f}{i.end * 1e6:>10.1f}  {i.lane:<9}{i.label:<12}{i.reason}")
    return "\n".join(lines)


def row_chunks(P: int, T: int, training: bool, count: int) -> dict[str, Any]:
    """The default workload with `count` chunks of rows, on hosts of eight H200s and cards; times in seconds.

    Beside it the chunks along L that the planner takes. Weights are read once more with each chunk of rows. Where there
    is a backward, each weight's gradient becomes a sum of the chunks', which no longer equals the unchunked layer's bit
    for bit: with what it costs in training, that is why the layer does not do it.
    """
    asked = Question("H200", P, training=training, workload=(512, T, 1280, 6))
    layout, along = asked.layout, asked.plan()
    chunks = Plan((1,) * count, along.ratio_16ths, reserved_sms=plan.RESERVED_SMS if count > 1 else 0)
    by_rows = Case(asked.machine, layout, chunks, training, by_rows=True)
    total, alone = simulate(by_rows), simulate(replace(by_rows, exchanged=False))
    times = {"none_s": asked.timeline(None).total, "along_tokens_s": asked.timeline(along).total,
             "overlapped_s": total.total, "alone_s": alone.total, "exposed_s": total.exposed}  # fmt: skip
    weights = 2 * 3 * layout.L * layout.D * layout.H
    return {
        "machine": "H200", "P": P, "T": T, "L": layout.L, "pass": "forward+backward" if training else "forward",
        "row_chunks": count, "plan_along_tokens": str(along), **_rounded(times),
        "weights_read_again_bytes": (count - 1) * weights * (2 if training else 1),
        "gradients_added_bytes": (count - 1) * weights if training else 0,
    }  # fmt: skip


def rows_table(rows: list[dict[str, Any]]) -> str:
    """`row_chunks` as text; times in milliseconds."""
    lines = [f"{'P':>3}{'T':>4}{'L':>3}  {'pass':<17}{'row chunks':>11}{'overlapped':>12}{'alone':>8}{'exposed':>9}"
             f"{'along L':>10}{'overlapped':>12}{'weights again MiB':>19}{'gradients added MiB':>21}"]  # fmt: skip
    for row in rows:
        times = [f"{row[f'{name}_s'] * 1e3:.3f}" for name in ("overlapped", "alone", "exposed", "along_tokens")]
        again, added = (f"{row[name] / 2**20:.0f}" for name in ("weights_read_again_bytes", "gradients_added_bytes"))
        lines.append(
            f"{row['P']:>3}{row['T']:>4}{row['L']:>3}  {row['pass']:<17}{row['row_chunks']:>11}{times[0]:>12}"
            f"{times[1]:>8}{times[2]:>9}{row['plan_along_tokens'].split()[0]:>10}{times[3]:>12}{again:>19}{added:>21}"
        )
    return "\n".join(lines)


def modes(asked: Question) -> str:
    """The planner's choice and all of its candidates, the predicted fastest first: a list for compare.py's --modes.

    All are through collectives, the first the choice by the costs that are measured there. It is a candidate too, so
    the two show the noise.
    """
    ranked = plan.ranked_on(asked.machine, asked.layout, 2, "cuda", asked.training, asked.settings)
    sizes = ("/".join(map(str, each.sizes)) if len(each.sizes) > 1 else "1" for each in ranked)
    through = f"kernel:TRANSPORT={COLLECTIVES}"
    return ",".join(["none", through, *(f"{through}+CHUNKS={each}" for each in sizes)])


def calibration() -> str:
    """On what the simulation was calibrated, and how far it is off elsewhere, in a line."""
    judged = json.loads(CALIBRATION.read_text())
    fitted_on = len({each["configuration"] for each in judged["fitted_on"]})
    others, worst = len(judged["configurations"]), max((each["error"] for each in judged["judged"]), key=abs)
    return (
        f"fitted on {fitted_on} configurations of two H200s; median error {judged['median_error']:.1%} of "
        f"{len(judged['judged'])} other latencies, {judged['median_error_of_configurations']:.1%} of {others} "
        f"configurations' medians, {judged['median_error_of_overlapped']:.1%} of overlapped layers, at worst {worst:+.1%} "
        f"({CALIBRATION.relative_to(ROOT)})"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--standard", action="store_true", help="the standard cases (also without any argument)")
    add("--rows", action="store_true", help="chunks of rows where a rank has one token, and four")
    add("--modes", action="store_true", help="only print the planner's candidates as modes of compare.py")
    add("--machine", choices=sorted(GPUS), default="H200")
    add("--ranks", type=int, default=8, help="P (default: %(default)s)")
    add("--gpus-per-host", type=int, default=8)
    add("--link", choices=sorted(LINKS), default=NVLINK.name, help="between the GPUs of a host (default: %(default)s)")
    add("--cards", type=int, choices=range(1, 9), default=8, help="400 Gb/s cards of a host (default: %(default)s)")
    add("--stack", choices=sorted(STACKS), default=machines.COMPILED.name)
    add("--transport", choices=(COLLECTIVES, PEERS), default=COLLECTIVES)
    add("--chunks", type=int, help="chunks along L, of two tokens at least (default: the planner's)")
    add("--backward", action="store_true")
    for name, default in zip(("--batch-size", "--tokens", "--dim", "--k"), DEFAULT):
        add(name, type=int, default=default, help="(default: %(default)s)")
    add("--comm-scale", type=int, default=1)
    add("--compute-scale", type=int, default=1)
    add("--path", action="store_true", help="also the critical path")
    add("--json", type=Path, help="also write the rows here")
    return parser


def main() -> int:
    parser = build_parser()
    options = parser.parse_args()
    try:
        return _run(options)
    except ValueError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    """Print and write what is asked for. Raises ValueError for a question that has no answer."""
    if options.modes:
        print(modes(_question(options)))
        return 0
    print(f"SIMULATED: {calibration()}")
    if options.rows:
        rows = [row_chunks(*each) for each in itertools.product((16,), (16, 64), (False, True), (1, 2, 4, 8))]
        print(rows_table(rows))
    else:
        questions = list(standard()) if options.standard or len(sys.argv) == 1 else [_question(options)]
        rows = [answer(each) for each in questions]
        print(table(rows))
        if options.path:
            print("\n".join(path(each.timeline(each.plan())) for each in questions))
    if options.json:
        marked = {"schema": record.SCHEMA_VERSION, "kind": "simulation", "simulated": True}
        record.write({**marked, "calibration": calibration(), "cases": rows}, options.json)
    return 0


_COUNTS = ("ranks", "gpus_per_host", "batch_size", "tokens", "dim", "k", "comm_scale", "compute_scale", "chunks")
_MOST = 1 << 20  # of each: their products stay within what floating point holds


def _question(options: argparse.Namespace) -> Question:
    """Raises ValueError where a count is not between 1 and `_MOST`, or there is nothing to exchange."""
    for name in _COUNTS:
        value = getattr(options, name)
        require(value is None or 1 <= value <= _MOST, name, value, f"from 1 to {_MOST}")
    require(options.ranks >= 2, "ranks", options.ranks, "at least 2, one rank has nothing to exchange")
    workload = options.batch_size, options.tokens, options.dim, options.k
    return Question(options.machine, options.ranks, options.gpus_per_host, options.link, options.cards, options.stack,
                    options.transport, options.backward, workload, options.comm_scale, options.compute_scale,
                    Settings(chunks=options.chunks))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
