"""Small models and random ones for the tests of the pure half; hypothesis strategies."""

from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from liver_core.layout import BucketRule, Manifest, Member, ParallelLayout, ParameterSpec, Roster, StateKind

KINDS = tuple(StateKind(name, "float32") for name in ("master", "exp_avg", "exp_avg_sq"))


def spec(name, shape, tp_dim=None, *, blocks=1, place="layer", layer=-1, order=0, tied_to="", unit=1) -> ParameterSpec:
    """A float32 parameter; a layer number puts it into a layer."""
    return ParameterSpec(name, tuple(shape), "float32", tp_dim, blocks, place, layer, order, tied_to, unit)


def gpt(*, layers=4, hidden=32, heads=8, groups=4, ffn=64, vocab=128, tied=False, gated=True, rule=None) -> Manifest:
    """A GPT with grouped-query attention and gated units, shaped as Megatron's dense one. Same sizes as its tests."""
    qkv = groups * (heads // groups + 2) * (hidden // heads)
    found = [spec("embedding.word_embeddings.weight", (vocab, hidden), 0, place="first")]
    for layer in range(layers):
        rows = (
            ("input_layernorm.weight", (hidden,), None, 1, 1),
            ("self_attention.linear_qkv.weight", (qkv, hidden), 0, 1, qkv // groups),
            ("self_attention.linear_proj.weight", (hidden, hidden), 1, 1, 1),
            ("pre_mlp_layernorm.weight", (hidden,), None, 1, 1),
            ("mlp.linear_fc1.weight", (2 * ffn if gated else ffn, hidden), 0, 2 if gated else 1, 1),
            ("mlp.linear_fc2.weight", (hidden, ffn), 1, 1, 1),
        )
        for order, (name, shape, dim, blocks, unit) in enumerate(rows):
            name = f"decoder.layers.{layer}.{name}"
            found.append(spec(name, shape, dim, blocks=blocks, layer=layer, order=order, unit=unit))
    found.append(spec("decoder.final_layernorm.weight", (hidden,), place="last"))
    tie = "embedding.word_embeddings.weight" if tied else ""
    found.append(spec("output_layer.weight", (vocab, hidden), 0, place="last", order=1, tied_to=tie))
    return Manifest(tuple(found), layers, KINDS, rule or BucketRule())


def roster(layout: str | ParallelLayout, *, generation=0, slots=1, first=0, order=None) -> Roster:
    """A roster over nodes n0, n1, ... with `slots` ranks each, from process `first` on; `order` permutes members."""
    layout = ParallelLayout.parse(layout) if isinstance(layout, str) else layout
    places = [first + rank for rank in range(layout.world_size)] if order is None else order
    return Roster("job", generation, layout, tuple(Member(f"n{at // slots}", at % slots) for at in places))


def moe(*, layers=4, hidden=32, experts=4, ffn=48, dense_layers=0, bias=False, rule=None) -> Manifest:
    """The same with experts behind a router in all layers but the first `dense_layers`. `bias`: experts have biases."""
    found = [each for each in gpt(layers=layers, hidden=hidden).parameters if ".mlp." not in each.name]
    dense = [each for each in gpt(layers=layers, hidden=hidden).parameters if ".mlp." in each.name]
    found += [each for each in dense if each.layer < dense_layers]
    for layer in range(dense_layers, layers):
        found.append(spec(f"decoder.layers.{layer}.mlp.router.weight", (experts, hidden), layer=layer, order=4))
        rows = [("linear_fc1.weight", (2 * ffn, hidden), 0, 2), ("linear_fc2.weight", (hidden, ffn), 1, 1)]
        rows += [("linear_fc2.bias", (hidden,), None, 1)] if bias else []
        for expert in range(experts):
            for order, (name, shape, dim, blocks) in enumerate(rows):
                name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}"
                one = spec(name, shape, dim, blocks=blocks, layer=layer, order=order)
                found.append(replace(one, expert=expert, slot=5))
    return Manifest(tuple(found), layers, KINDS, rule or BucketRule())


@st.composite
def layouts(draw, *, chunks, tps, ranks_max=24, experts=0) -> ParallelLayout:
    """A layout with pp * vpp out of `chunks` and tp out of `tps`; world sizes need not be powers of two. With experts,
    EP divides them, and ETP is TP or, with EP, a part of it."""
    tp = draw(st.sampled_from(tps))
    pp, vpp = draw(st.sampled_from(chunks))
    room = max(1, ranks_max // (tp * pp))
    dp = draw(st.integers(1, min(5, room)))
    cp = draw(st.integers(1, min(3, max(1, room // dp))))
    cuts = [
        (ep, etp)
        for ep in range(1, experts + 1)
        for etp in range(1, tp + 1)
        if experts % ep == 0 and tp % etp == 0 and tp * dp * cp % (ep * etp) == 0 and (ep > 1 or etp == tp)
    ]
    ep, etp = draw(st.sampled_from(cuts)) if cuts else (1, None)
    return ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, ep=ep, etp=etp)


@st.composite
def worlds(draw, count: int, *, ranks_max=24) -> tuple[Manifest, *tuple[ParallelLayout, ...]]:
    """A random model, with or without experts, and so many layouts that it fits."""
    experts = draw(st.sampled_from([0, EXPERTS]))
    drawn = layouts(chunks=CHUNKS, tps=TENSOR_PARALLEL, ranks_max=ranks_max, experts=experts)
    return draw(manifests(experts=experts)), *(draw(drawn) for _ in range(count))


# Every pair of layouts drawn for one manifest cuts these: 12 layers, and dims that are multiples of 12.
CHUNKS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (2, 3), (3, 2)]
TENSOR_PARALLEL = [1, 2, 3, 4, 6]
EXPERTS = 12


@st.composite
def shapes(draw) -> tuple[tuple[int, ...], int | None, int]:
    """(shape, tp_dim, blocks) of 1 to 4 dims; the split dim is a multiple of 12 * blocks, the others are uneven."""
    dims = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, (40, 12, 5, 4)[dims - 1])) for _ in range(dims)]
    tp_dim = draw(st.none() | st.integers(0, dims - 1))
    if tp_dim is None:
        return tuple(shape), None, 1
    blocks = draw(st.sampled_from([1, 1, 2, 3])) if tp_dim == 0 else 1
    shape[tp_dim] = 12 * blocks * draw(st.integers(1, 2))
    return tuple(shape), tp_dim, blocks


@st.composite
def manifests(draw, *, experts=0) -> Manifest:
    """A model of 12 layers whose parameters have random shapes and splits; sometimes tied, sometimes many buckets. With
    experts, one or two lists of them stand somewhere in each layer, or in each but a few."""
    layer_shapes = draw(st.lists(shapes(), min_size=1, max_size=3))
    first, last = draw(shapes()), draw(shapes())
    tied = draw(st.booleans())
    found = [spec("first", first[0], first[1], blocks=first[2], place="first")]
    for layer in range(12):
        for order, (shape, dim, blocks) in enumerate(layer_shapes):
            found.append(spec(f"layers.{layer}.p{order}", shape, dim, blocks=blocks, layer=layer, order=2 * order))
    without = draw(st.sets(st.integers(0, 11), max_size=11)) if experts else set(range(12))
    lists = draw(st.lists(st.lists(shapes(), min_size=1, max_size=2), min_size=1, max_size=2)) if experts else []
    for layer, (slot, of_one), expert in product(set(range(12)) - without, enumerate(lists), range(experts)):
        for order, (shape, dim, blocks) in enumerate(of_one):
            name = f"layers.{layer}.list{slot}.{expert}.e{order}"
            one = spec(name, shape, dim, blocks=blocks, layer=layer, order=order)
            found.append(replace(one, expert=expert, slot=2 * slot + 1))
    found.append(spec("last", last[0], last[1], blocks=last[2], place="last"))
    if tied:
        found.append(spec("copy", first[0], first[1], blocks=first[2], place="last", order=1, tied_to="first"))
    elements_max = draw(st.none() | st.integers(1, 2000))
    rule = BucketRule(
        align_elements=draw(st.sampled_from([1, 8, 64])),
        end_multiple=draw(st.sampled_from([64, 128])),
        elements_max=elements_max,
        elements_max_per_dp=0 if elements_max is None else draw(st.sampled_from([0, 0, 100, 1000])),
    )
    if draw(st.booleans()):
        numbers = sorted({_dtype_number(each) for each in found})
        narrow = draw(st.sets(st.sampled_from(numbers)))
        found = [replace(each, dtype="bfloat16") if _dtype_number(each) in narrow else each for each in found]
    kinds = (*KINDS, StateKind("grad", draw(st.sampled_from(["float32", "parameter"]))))
    return Manifest(tuple(found), 12, kinds, rule)


def _dtype_number(spec: ParameterSpec) -> int:
    """Parameters of one number have one dtype: tied ones, and those that stand at the same place in a layer."""
    if spec.place == "layer":
        return 100 * spec.slot + spec.order
    return -1 if spec.name == "last" else -2
