"""Questions `plan` and `decode_layers`: what planning a step costs, and what planning it once for all layers saves.

`plan`: who does which tile of a step of decoding, 1 and 64 requests of 4k tokens and 1,024 of 1k, 32 heads on 8 of 128,
pages of 16. On a GPU, the kernel that plans: one of 20 updates of an `AttentionPlan` in a CUDA graph. On the host, the
time of an update, its launch; of the same plan by `schedule.WorkList`; and of FlashInfer's plan where `flashinfer`
imports. Keys are not looked at, so that the pool has but one page.

`decode_layers`: 64 x 4k and 128 x 1k tokens in each of eight layers, in one CUDA graph: a call for each, which plans
anew, or (`.planned`) one update of a plan and eight runs. Times are those of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.paged import Batch, Tensors, dtype_of, find_flashinfer, flashinfer_decode, reference, tensors
from benchmarks.cases.serving import equal, problem_of, row_bytes, workload
from benchmarks.contenders import sources_of
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import relative_error
from benchmarks.steps import ROWS, Contender, measure, refusal
from benchmarks.timing import ceilings, host_times, method
from tilewise.schedule.worklist import WorkList

ROUNDS, HOST_ROUNDS = 20, 10
UPDATES, LAYERS = 20, 8
PROGRAMS, TILE = 132, (16, 128)  # of `hopper_decode` on an H200: multiprocessors, and a tile's rows and keys
ON_GPU = f"one of {UPDATES} updates of a plan, replayed from a CUDA graph"
ON_HOST = (
    "host time; ours: `AttentionPlan.update`, one launch on a GPU; "
    f"worklist: from lengths in NumPy arrays, units, and where each of {PROGRAMS} programs begins; "
    "flashinfer: the `plan` of its decode wrapper, lengths on the host"
)
OF_LAYER = f"one of {LAYERS} layers of a step, replayed from a CUDA graph; planned: with its share of one plan"


def run(options: Options) -> None:
    """Measure the questions that are wanted, which are the parts."""
    device, rounds = options.device, min(options.rounds, ROUNDS)
    flashinfer, says = find_flashinfer(device)
    print(says, flush=True)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    how = f"{method(device, rounds)}; on the host the monotonic clock around {UPDATES} calls in a row; {says}"
    writer = Writer(current(device), method=how, ceilings=ceiling, results=options.out)
    with torch.no_grad():
        if options.wants("plan"):
            for batch in equal(options.quick, (1, 4096, 0), (64, 4096, 0), (1024, 1024, 0)):
                given = lengths_alone(batch, dtype_of(device), device)
                if device == "cuda":
                    plan_on_gpu(batch, given, writer, device, rounds)
                plan_on_host(batch, given, flashinfer, writer, device, min(rounds, HOST_ROUNDS))
        if options.wants("decode_layers"):
            for batch in equal(options.quick, (64, 4096, 0), (128, 1024, 0)):
                _layers(batch, writer, device, rounds)


def lengths_alone(batch: Batch, dtype: torch.dtype, device: str) -> Tensors:
    """A batch whose tokens all lie in one page: enough for who looks at lengths alone."""
    q = torch.zeros(len(batch.lengths), 1, batch.heads_q, batch.head_dim, dtype=dtype, device=device)
    pool = torch.zeros(1, 2, batch.page_size, batch.heads_kv, batch.head_dim, dtype=dtype, device=device)
    pages = -(-max(batch.lengths) // batch.page_size)
    table = torch.zeros(len(batch.lengths), pages, dtype=torch.int32, device=device)
    return Tensors(q, pool, tw.Paged(table, torch.tensor(batch.lengths, dtype=torch.int32, device=device)))


def plan_on_gpu(batch: Batch, given: Tensors, writer: Writer, device: str, rounds: int) -> None:
    """The kernels that plan, one after another, so that a time has no launch from the host in it."""
    q, k, v, layout = given.q, given.pool[:, 0], given.pool[:, 1], given.layout
    contenders = {}
    for row in ROWS[device]:
        refused = refusal(row, q, k, v, layout=layout)
        plan = tw.plan(q, k, v, layout=layout, impl=row) if refused is None else None
        contenders[f"tilewise.{row}"] = Contender(_updates(plan), refused, repeats=UPDATES)
    problem = problem_of(batch, workload(batch), q.dtype) | {"on": "GPU"}
    measure("plan", problem, contenders, writer, device=device, rounds=rounds, includes=ON_GPU)


def _updates(plan: Any) -> Callable[[], None]:
    def step() -> None:
        for _ in range(UPDATES):
            plan.update()

    return step


def plan_on_host(batch: Batch, given: Tensors, flashinfer: Any, writer: Writer, device: str, rounds: int) -> None:
    """What the host does for a plan; ours on a GPU, where the host makes none, is a launch."""
    q, k, v, layout = given.q, given.pool[:, 0], given.pool[:, 1], given.layout
    calls: dict[str, Callable[[], object]] = {}
    for row in ROWS[device]:
        if refusal(row, q, k, v, layout=layout) is None:
            calls[f"tilewise.{row}"] = tw.plan(q, k, v, layout=layout, impl=row).update
    keys = np.array(batch.lengths, dtype=np.int32)
    queries = np.ones_like(keys)
    calls["tilewise.worklist"] = lambda: worklist(batch, queries, keys)
    if flashinfer is not None:
        calls["flashinfer"] = flashinfer_decode(flashinfer, batch, given)[1]
    timed = host_times(calls, device=device, rounds=rounds, repeat=UPDATES)
    for name, result in timed.items():
        writer.write(
            "plan", problem_of(batch, workload(batch), q.dtype) | {"on": "host"}, name, times_ms=result.quantiles,
            error={"metric": "failure", "message": result.failure} if result.failure else None,
            includes=ON_HOST, sources=sources_of(name),
        )  # fmt: skip


def worklist(batch: Batch, queries: Any, keys: Any) -> tuple[Any, ...]:
    """The host's twin of the plan: (unit, head, tile) where each program begins."""
    rows, block_n = TILE
    work = WorkList.build(
        queries, keys, heads_q=batch.heads_q, heads_kv=batch.heads_kv, programs=PROGRAMS, rows=rows, block_n=block_n
    )
    return work.places(work.starts)


def _layers(batch: Batch, writer: Writer, device: str, rounds: int) -> None:
    given = tensors(batch, dtype_of(device), device)
    q, layout = given.q, given.layout
    request = len(batch.lengths) - 1
    want = reference(batch, given, request)
    # two pools in turn, so that no layer finds in the cache what the one before read last
    layers = [(pool[:, 0], pool[:, 1]) for pool in (given.pool, given.pool.clone())] * (LAYERS // 2)
    nbytes = batch.distinct * row_bytes(given.pool[:, 0], given.pool[:, 1])
    contenders = {}
    for row in ROWS[device]:
        refused = refusal(row, q, *layers[0], layout=layout)
        plan = tw.plan(q, *layers[0], layout=layout, impl=row) if refused is None else None
        for name, step in (("", _plain(row, q, layers, layout)), (".planned", _planned(plan, q, layers))):
            contenders[f"tilewise.{row}{name}"] = Contender(step, refused, LAYERS, nbytes)
    measure(
        "decode_layers", problem_of(batch, workload(batch), q.dtype) | {"layers": LAYERS}, contenders, writer,
        device=device, rounds=rounds, includes=OF_LAYER, error=lambda _, o: relative_error(o[request, 0], want),
    )  # fmt: skip


Layers = list[tuple[torch.Tensor, torch.Tensor]]


def _plain(row: str, q: torch.Tensor, layers: Layers, layout: tw.Paged) -> Callable[[], torch.Tensor]:
    return lambda: [tw.attention(q, k, v, layout=layout, impl=row) for k, v in layers][-1]


def _planned(plan: Any, q: torch.Tensor, layers: Layers) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        plan.update()
        o: torch.Tensor = [plan.run(q, k, v) for k, v in layers][-1]
        return o

    return step
