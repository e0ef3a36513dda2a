"""Keys and blocks that the code in minference's sdist chooses: the family of
tests/data/sparse/minference.json.

The code needs a GPU. Here its modules are imported from the unpacked sdist without a build. `triton`
and the compiled extension are replaced by empty modules, and calls for "cuda" use the CPU (`Watch`).
Calls of attention kernels are captured instead of executed: their arguments are the choice. The CUDA
kernel `convert_vertical_slash_indexes`, whose threads are independent, is extracted from the sdist's
csrc and compiled for the CPU. FlexPrefill computes the mean of blocks with a Triton kernel; here
torch computes it.
"""

import contextlib
import ctypes
import importlib
import importlib.machinery
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from types import ModuleType, SimpleNamespace

import torch

from portable import Missing, TooClose, Watch, inputs, packed, repeated


class Captured(Exception):
    """The arguments of a kernel call that was captured."""


class Anything(ModuleType):
    """A stub for a module of decorators and constants."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def decorator(*args, **kwargs):
            return args[0] if args and callable(args[0]) and not kwargs else decorator

        return decorator


def root():
    path = pathlib.Path(os.environ.get("KVTIER_MINFERENCE") or "none")
    if not (path / "minference/modules/minference_forward.py").is_file():
        raise Missing("the unpacked sdist of minference 0.1.6.0 (--minference DIR)")
    return path


def versions():
    try:
        import einops  # noqa: F401
        import transformers
    except ImportError as error:
        raise Missing(f"minference: {error}") from error
    version = (root() / "PKG-INFO").read_text().split("\nVersion: ")[1].split("\n")[0]
    return {"minference": version, "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}


def load(module):
    """Imports a module of the sdist without executing the code of its packages."""
    if "minference" not in sys.modules:
        # Import modules that look for triton before the stub of triton exists.
        for name in ("torch._dynamo", "transformers.generation", "transformers.models.glm.modeling_glm"):
            importlib.import_module(name)
        # In newer versions of transformers it returns a pair, which counts as true.
        importlib.import_module("transformers.utils.import_utils")._is_package_available = lambda *_: False
        for name in ("triton", "triton.language"):
            sys.modules[name] = Anything(name)
        sys.modules["triton"].language = sys.modules["triton.language"]
        for name in ("minference", "minference.modules", "minference.ops"):
            package = ModuleType(name)
            package.__path__ = [str(root() / name.replace(".", "/"))]
            sys.modules[name] = package
        cuda = Anything("minference.cuda")
        cuda.convert_vertical_slash_indexes = convert
        sys.modules["minference.cuda"] = cuda
    with Watch(), contextlib.redirect_stdout(None):
        return importlib.import_module("minference." + module)


def convert(seqlens, columns, diagonals, tokens, rows, keys):
    """`convert_vertical_slash_indexes` of csrc on the CPU."""
    heads, rows = columns.shape[1], -(-tokens // 64)
    made = lambda *size: torch.zeros(1, heads, rows, *size, dtype=torch.int32)
    out = made(), made(diagonals.shape[2]), made(), made(columns.shape[2])
    at = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
    sources = [t.contiguous() for t in (seqlens, columns, diagonals)]
    compiled().run(*map(at, sources), *map(at, out), heads, rows, columns.shape[2], diagonals.shape[2])
    return out


SHIM = """
#include <algorithm>
#define __device__
#define __global__
using std::max; using std::min;
static struct { int x, y, z; } blockIdx, blockDim, threadIdx;
%s
extern "C" void run(const int *len, const int *v, const int *s, int *bc, int *bo, int *cc, int *ci,
                    int heads, int rows, int nv, int ns) {
    blockDim.x = 64;
    for (blockIdx.x = 0; blockIdx.x < heads; blockIdx.x++)
        for (blockIdx.z = 0; blockIdx.z < (rows + 63) / 64; blockIdx.z++)
            for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++)
                convert_vertical_slash_indexes_kernel(len, v, s, bc, bo, cc, ci, heads, rows, 64, 64, nv, ns);
}
"""


def compiled():
    global LIBRARY
    if LIBRARY is None:
        source = (root() / "csrc/vertical_slash_index.cu").read_text()
        begin, end = map(source.index, ("__device__ void save_blocks", "void convert_vertical_slash_indexes_64x64"))
        kernel = source[begin:end]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "convert.cpp"
            path.write_text(SHIM % kernel)
            subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", path, "-o", f"{folder}/c.so"], check=True)
            LIBRARY = ctypes.CDLL(f"{folder}/c.so")
    return LIBRARY


LIBRARY = None


def base(name, ask, spec, heads, key_heads, tokens, **more):
    return {"name": name, "ask": ask, "spec": spec, "heads": heads, "key_heads": key_heads,
            "dim": 16, "tokens": tokens, "gains": [4.0, 2.0, 6.0], "period": 0, "layers": 4,
            "layer": 0, **more}  # fmt: skip


def cases():
    shapes = [(4, 4, 320), (4, 2, 501), (8, 2, 640), (4, 1, 449)]
    for n, (heads, key_heads, tokens) in enumerate(shapes):
        one = lambda kind, ask, spec, **more: base(f"{kind} {n} {spec}", ask, spec, heads, key_heads, tokens, **more)
        for v, s in ((40, 120), (7, 150), (100, 101)):
            sizes = f"vertical={v},slash={s}"
            yield one("lines", "lines", f"minference({sizes})", vertical=v, slash=s, period=48)
            yield one("kernel", "kernel", f"minference({sizes},form=kernel)", vertical=v, slash=s)
        for count in (1, 3):
            yield one("pooled", "blocks", f"minference(type=block_sparse,blocks={count})", count=count, period=64)
        for budget, page in ((64, 16), (40, 16), (96, 8)):
            yield one("quest", "pages", f"quest(budget={budget},page={page},dense=2)", budget=budget, page=page,
                      layer=2)  # fmt: skip
        for stay in (80, 200):
            yield one("snapkv", "evict", f"snapkv(budget={stay},window=32,form=original)",
                      stay=stay, window=32, pool="avg")  # fmt: skip
            yield one("streaming", "evict", f"streaming(sinks=8,recent={stay - 8})", stay=stay, window=stay - 8)
            for layer in range(4):
                yield one("pyramidkv", "evict", f"pyramidkv(budget={stay},window=16,beta=8,form=original)",
                          stay=stay, window=16, beta=8, layer=layer)  # fmt: skip
        # With a budget above half, every layer keeps the same number.
        yield one("pyramidkv", "evict", "pyramidkv(budget=300,window=16,beta=8,form=original)",
                  stay=300, window=16, beta=8, layer=3)  # fmt: skip
    # Maximum pooling makes plateaus of equal scores: with many heads few seeds have clear cuts.
    for kernel in (3, 5):
        spec = f"snapkv(budget=90,window=16,kernel={kernel},pool=max,form=original)"
        yield base(f"snapkv max {kernel}", "evict", spec, 2, 1, 210, stay=90, window=16, kernel=kernel, pool="max")
    shapes = [(2, 2, 1024, 128, 8), (4, 2, 1000, 128, 8), (4, 1, 517, 64, 16), (2, 1, 131, 32, 4)]
    for n, (heads, key_heads, tokens, block, stride) in enumerate(shapes):
        for tau in (0.5, 0.9):
            spec = f"xattention(block={block},stride={stride},tau={tau},compat=true)"
            yield base(f"xattention {n} {tau}", "blocks", spec, heads, key_heads, tokens, block=block,
                       stride=stride, tau=tau, period=block)  # fmt: skip
    # More than 16384 tokens, which xattention processes at a time.
    yield base("xattention long", "blocks", "xattention(block=512,stride=64,tau=0.7,compat=true)", 1, 1,
               20_000, dim=8, block=512, stride=64, tau=0.7, gains=[6.0], period=700)  # fmt: skip
    shapes = [(4, 4, 1024, 128), (4, 2, 768, 128), (8, 2, 1280, 128), (4, 1, 512, 64)]
    for n, (heads, key_heads, tokens, block) in enumerate(shapes):
        for gamma, tau, least, most in ((0.9, 0.1, 0, 0), (0.7, 0.2, 0, 0), (0.95, 0.0, 0, 0), (0.6, 0.1, 300, 500)):
            spec = f"flexprefill(block={block},gamma={gamma},tau={tau},min_budget={least},max_budget={most})"
            yield base(f"flexprefill {n} {gamma}", "flex", spec, heads, key_heads, tokens, block=block, gamma=gamma,
                       tau=tau, least=1e-5, min_budget=least, max_budget=most, gains=[1.0, 8.0, 0.25, 3.0],
                       period=block)  # fmt: skip
    # Every head chooses blocks, and the last block is not full. Heads with lines are left out:
    # minference counts the diagonals of such prompts from the other end.
    for n, (heads, key_heads, tokens, block) in enumerate([(4, 2, 1000, 128), (4, 1, 700, 64)]):
        for gamma in (0.6, 0.9):
            spec = f"flexprefill(block={block},gamma={gamma},tau=1)"
            yield base(f"flexprefill blocks {n} {gamma}", "flex", spec, heads, key_heads, tokens, block=block,
                       gamma=gamma, tau=1.0, least=1e-5, min_budget=0, max_budget=0, gains=[1.0, 8.0, 0.25, 3.0],
                       period=block)  # fmt: skip


def run(case, watch):
    kind = case["name"].split()[0]
    return {"lines": lines, "kernel": lines, "pooled": pooled, "quest": quest, "snapkv": kept,
            "streaming": kept, "pyramidkv": kept, "xattention": xattention,
            "flexprefill": flexprefill}[kind](case, watch)  # fmt: skip


def lines(case, watch):
    """Columns and diagonals of each head; for `kernel`, the keys of each row of 64 queries."""
    module = load("modules.minference_forward")
    q, k = inputs(case)
    k = repeated(k, case)
    sizes = ("vertical_and_slash", case["vertical"], case["slash"], 1)
    settings = SimpleNamespace(to_dict=dict)
    out = []
    for head in range(case["heads"]):
        me = SimpleNamespace(head_dim=case["dim"], config=settings, best_pattern={head: sizes})

        def capture(q, k, v, columns, diagonals):
            raise Captured(columns, diagonals)

        module.vertical_slash_sparse_attention = capture
        one = lambda x: x[:, head : head + 1]
        try:
            with watch:
                module.gather_last_q_vertical_slash_topk_v4(me, one(q), one(k), one(k), head)
        except Captured as found:
            columns, diagonals = found.args
        if case["ask"] == "lines":
            out.append([packed(columns.flatten().tolist()), packed(diagonals.flatten().tolist())])
        else:
            out.append(inflated(columns, diagonals, one(k)))
    return {"heads": out}


def inflated(columns, diagonals, k):
    ops = load("ops.pit_sparse_flash_attention_v2")

    def capture(q, k, v, lengths, *rest, **more):
        raise Captured(*rest[:4])

    ops.sparse_attn_func, ops.convert_vertical_slash_indexes_opt = None, None
    ops._triton_mixed_sparse_attention = capture
    try:
        ops.vertical_slash_sparse_attention(k, k, k, columns, diagonals)
    except Captured as found:
        counts, blocks, singles, keys = (t[0, 0].tolist() for t in found.args)
    rows = []
    for row in range(len(counts)):
        # The kernel masks keys behind a query.
        end = min(64 * row + 64, k.shape[2])
        wide = {key for first in blocks[row][: counts[row]] for key in range(first, first + 64)}
        rows.append(packed(key for key in wide | set(keys[row][: singles[row]]) if key < end))
    return rows


def pooled(case, watch):
    """The chosen blocks of each row that begin at or before the row."""
    ops = load("ops.block_sparse_flash_attention")
    q, k = inputs(case)

    def capture(q, k, v, lengths, blocks, *rest):
        raise Captured(blocks)

    ops._triton_block_sparse_attention = capture
    rows = -(-case["tokens"] // 64)
    # If a prompt consists of whole blocks, there is one more row of padding.
    watch.rows = rows
    try:
        with watch:
            ops.block_sparse_attention(q, repeated(k, case), k, case["count"])
    except Captured as found:
        blocks = found.args[0][0].tolist()
    return {"heads": [[packed(b for b in head[r] if b <= r) for r in range(rows)] for head in blocks]}


def quest(case, watch):
    """The keys of each query head, from the mask of `quest_forward`."""
    module = load("modules.quest")
    q, k = inputs(case)
    heads, key_heads, dim, tokens = (case[n] for n in ("heads", "key_heads", "dim", "tokens"))
    cache = SimpleNamespace(get_seq_length=lambda layer: tokens - 1, update=lambda k_, v_, layer: (k, k))
    last = lambda x: x[:, :, -1:].transpose(1, 2).reshape(1, 1, -1)
    me = SimpleNamespace(
        layer_idx=case["layer"], num_heads=heads, num_key_value_heads=key_heads, head_dim=dim,
        num_key_value_groups=heads // key_heads, chunk_size=case["page"], token_budget=case["budget"],
        q_proj=lambda _: last(q), k_proj=lambda _: last(k), v_proj=lambda _: last(k),
        rotary_emb=lambda *_: (None, None), hidden_size=heads * dim,
    )  # fmt: skip
    module.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    theirs = MASKS.setdefault("quest", module.local_heavy_hitter_mask)

    def capture(*args):
        raise Captured(theirs(*args))

    module.local_heavy_hitter_mask = capture
    position = torch.tensor([[tokens - 1]])
    try:
        with watch:
            module.quest_forward(me, torch.zeros(1, 1, 1), position_ids=position, past_key_value=cache)
    except Captured as found:
        mask = found.args[0][0, :, 0]
    return {"lists": [packed(head.nonzero().flatten().tolist()) for head in mask]}


MASKS = {}


def kept(case, watch):
    """The tokens that the clusters keep, by query head: the values are positions."""
    name = case["name"].split()[0]
    q, k = inputs(case)
    k = repeated(k, case)
    common = {"window_size": case["window"], "max_capacity_prompt": case["stay"]}
    if name == "streaming":
        cluster = load("modules.snapkv").StreamingLLMKVCluster(**common)
    elif name == "snapkv":
        pool, kernel = case["pool"] + "pool", case.get("kernel", 5)
        cluster = load("modules.snapkv").SnapKVCluster(**common, pooling=pool, kernel_size=kernel)
    else:
        cluster = load("modules.pyramidkv").PyramidKVCluster(
            **common, num_hidden_layers=case["layers"], beta=case["beta"], layer_idx=case["layer"]
        )
    values = torch.arange(case["tokens"], dtype=torch.float32)[None, None, :, None].expand_as(k).contiguous()
    with watch:
        _, kept_values = cluster.update_kv(k, q, values, None, case["heads"] // case["key_heads"])
    return {"lists": [packed(head[:, 0].tolist()) for head in kept_values[0]]}


def xattention(case, watch):
    """The blocks of each row."""
    module = load("modules.xattention")
    q, k = inputs(case)
    theirs = MASKS.setdefault("xattention", module.find_blocks_chunked)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(name="none")

    def watched(sums, current, threshold, *rest, **more):
        watch_shares(sums, current, threshold, watch, -(-case["tokens"] // case["block"]))
        return theirs(sums, current, threshold, *rest, **more)

    module.find_blocks_chunked = watched
    with watch:
        _, mask = module.xattn_estimate(
            q, repeated(k, case), case["block"], case["stride"], threshold=case["tau"], use_triton=False
        )
    rows = -(-case["tokens"] // case["block"])
    return {"heads": [[packed(row.nonzero().flatten().tolist()) for row in head[:rows]] for head in mask[0]]}


def watch_shares(sums, current, tau, watch, blocks):
    """Records margins: of sums of the largest blocks to the share, and between these blocks."""
    with torch._C.DisableTorchFunctionSubclass():
        for head in sums[0].double():
            for row, of_row in enumerate(head):
                own = current + row
                if own >= blocks:
                    continue
                for forced in ({own}, {0, own}):
                    others = sorted((float(of_row[b]) for b in range(own) if b not in forced), reverse=True)
                    reached, needed = sum(float(of_row[b]) for b in forced), tau * float(of_row.sum())
                    for n, other in enumerate([0.0] + others):
                        reached += other
                        watch.note(abs(reached - needed) / needed)
                        if n and n < len(others):
                            watch.note((other - others[n]) / other)


def flexprefill(case, watch):
    """The blocks of each row, by head. For a head that chooses blocks, `crossing` is the block that
    crosses the share, which the published code leaves out."""
    module = load("modules.flexprefill")
    q, k = inputs(case)
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    tokens, block, gamma, tau = (case[n] for n in ("tokens", "block", "gamma", "tau"))
    blocks = -(-tokens // block)
    module.causal_mask = None
    module.triton_bnhd_pool = lambda x, size: torch.stack([part.mean(1) for part in x.split(size, 1)], 1)
    cover, take, far = (MASKS.setdefault(n, getattr(module, n)) for n in
                        ("score_cover_topk", "score_cover_idx", "square_root_js_divergence"))  # fmt: skip
    crossing, distances = [], []

    def count(x, score):
        low, high = (cover(x.double(), score * (1 + sign * 1e-5)) // 128 for sign in (-1, 1))
        if not torch.equal(low, high):
            raise TooClose("a count of columns or diagonals")
        return cover(x, score)

    def indices(x, score, padding_value=0):
        row, order = torch.sort(x.double(), descending=True)
        reached = row.cumsum(-1)
        watch.note(((reached - score).abs() / score).min())
        at = int((reached <= score).sum())
        for n in (at - 1, at):
            if 0 <= n and n + 1 < len(row) and row[n] > 0:
                watch.note((row[n] - row[n + 1]) / row[n])
        crossing.append(int(order[at]))
        return take(x, score, padding_value)

    def distance(p, q):
        found = far(p, q)
        watch.note((found - tau).abs().min())
        distances.append(found)
        return found

    module.score_cover_topk, module.score_cover_idx = count, indices
    module.square_root_js_divergence = distance
    # Each head uses its own number of blocks in this order.
    watch.all_gaps = True
    # As flex_prefill_attention calls it.
    least = math.ceil((case["min_budget"] or 1) / block)
    most = math.ceil((case["max_budget"] or 2147483647) / block)
    with watch:
        found = module.get_active_blocks(q, k, k, block, gamma, least, most, tau)
    by_blocks = (distances[0][0] < tau).nonzero().flatten().tolist()
    extra = dict(zip(by_blocks, crossing))
    heads = []
    for head, chosen in enumerate(found[0]):
        rows = [[] for _ in range(blocks)]
        for at in chosen.tolist():
            rows[at // blocks].append(at % blocks)
        heads.append([packed(b for b in row if b <= r) for r, row in enumerate(rows)])
    named = {head: [at // blocks, at % blocks] for head, at in extra.items()}
    return {"heads": heads, "crossing": [named.get(head, []) for head in range(case["heads"])]}
