"""The operations that the probe computes: every kind that training uses, forward and backward, by name.

Naming the cases costs nothing; all of them together take two seconds to compute. Their names are those of the golden
table.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.arithmetic.functions import UNARY
from evenstep.arithmetic.inputs import Input, filled, gradients, numbers, of, spread, with_gradients

__all__ = ["Case", "cases"]

Case = tuple[str, Callable[[], Any]]
Function = Callable[..., Tensor]

_LINEAR = ((16, 1024, 512), (64, 64, 10), (1, 256, 256), (127, 129, 131), (32, 300, 1000), (8, 3000, 24), (5, 7, 3))
_CONV2D: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((8, 3, 32, 32), (16, 3, 3, 3), {"padding": 1}),
    ((8, 16, 32, 32), (16, 16, 3, 3), {"padding": 1}),
    ((16, 32, 16, 16), (64, 32, 3, 3), {"stride": 2, "padding": 1}),
    ((16, 64, 8, 8), (64, 64, 3, 3), {"padding": 1}),
    ((16, 64, 8, 8), (64, 64, 1, 1), {}),
    ((2, 3, 56, 56), (32, 3, 7, 7), {"stride": 2, "padding": 3}),
    ((2, 128, 14, 14), (256, 128, 1, 1), {"stride": 2}),
    ((1, 128, 28, 28), (256, 128, 1, 1), {}),
    ((2, 256, 7, 7), (256, 256, 3, 3), {"padding": 1}),
    ((3, 5, 9, 11), (7, 5, 3, 3), {}),
    ((1, 16, 14, 14), (32, 16, 3, 3), {"padding": 1}),
    ((4, 1, 8, 8), (16, 1, 3, 3), {"padding": 1}),
    ((4, 16, 14, 14), (32, 16, 3, 3), {"dilation": 2}),
    ((4, 32, 14, 14), (32, 8, 3, 3), {"padding": 1, "groups": 4}),
    ((4, 32, 14, 14), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    ((4, 32, 14, 14), (32, 1, 5, 5), {"stride": 2, "padding": 2, "groups": 32}),
)
_DTYPES = (("float64", torch.float64), ("bfloat16", torch.bfloat16), ("float16", torch.float16))


def cases() -> Iterator[Case]:
    """All cases, as (name, function that returns tensors)."""
    for family in (
        _products,
        _attention,
        _convolutions,
        _functions,
        _reductions,
        _norms,
        _losses,
        _pools,
        _indices,
        _recurrent,
        _optimizers,
        _random,
        _precisions,
        _algebra,
    ):
        yield from family()


def _case(name: str, function: Function, *inputs: Input) -> Case:
    return name, partial(with_gradients, function, *inputs)


def _products() -> Iterator[Case]:
    for m, k, n in _LINEAR:
        yield _case(f"linear {m}x{k}x{n}", F.linear, of(m, k), of(n, k, salt=1), of(n, salt=2))
    a, b, c = of(33, 65), of(65, 47, salt=1), of(33, 47, salt=2)
    yield _case("mm", torch.mm, a, b)
    yield _case("mm transposed", lambda x, y: torch.mm(y.t(), x.t()), a, b)
    yield _case("addmm", lambda x, y, z: torch.addmm(z, x, y, beta=0.5, alpha=0.3), a, b, c)
    yield _case("mv", torch.mv, a, of(65))
    yield _case("dot", torch.dot, of(1003), of(1003, salt=1))
    yield _case("outer", torch.outer, of(33), of(65, salt=1))
    left, right = of(8, 33, 64), of(8, 64, 35, salt=1)
    yield _case("bmm", torch.bmm, left, right)
    added = of(8, 33, 35, salt=2)
    yield _case("baddbmm", lambda x, y, z: torch.baddbmm(z, x, y, beta=0.7, alpha=0.125), left, right, added)
    yield _case("matmul broadcast", torch.matmul, of(4, 1, 9, 20), of(3, 20, 11, salt=1))
    yield _case("einsum", lambda x, y: torch.einsum("bik,bkj->bij", x, y), left, right)
    yield _case("bilinear", F.bilinear, of(6, 10), of(6, 12, salt=1), of(5, 10, 12, salt=2))
    yield _case("cdist", torch.cdist, of(40, 30), of(35, 30, salt=1))


def _attention() -> Iterator[Case]:
    q, k, v = (of(2, 4, 70, 64, salt=salt) for salt in range(3))
    attend = F.scaled_dot_product_attention
    yield _case("attention", attend, q, k, v)
    yield _case("attention causal", partial(attend, is_causal=True), q, k, v)
    yield _case("attention masked", lambda a, b, c: attend(a, b, c, attn_mask=numbers(70, 70, salt=4) > -1), q, k, v)
    yield _case("attention long", attend, *(of(1, 2, 600, 16, salt=salt) for salt in range(3)))

    def encoder() -> list[Tensor]:
        layer = filled(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
        return [*with_gradients(layer, of(3, 11, 32)), *gradients(layer)]

    def weights() -> list[Tensor]:
        layer = filled(nn.MultiheadAttention(32, 4, batch_first=True))
        return [*with_gradients(lambda x: torch.cat(layer(x, x, x), 2), of(3, 11, 32)), *gradients(layer)]

    yield "transformer encoder layer", encoder
    yield "attention and its weights", weights


def _convolutions() -> Iterator[Case]:
    for x, w, options in _CONV2D:
        said = "".join(f" {key} {value}" for key, value in options.items())
        name = f"{'x'.join(map(str, x))} {'x'.join(map(str, w))}{said}"
        convolve = partial(F.conv2d, **options)
        inputs = of(*x), of(*w, salt=1), of(w[0], salt=2)
        yield _case(f"conv2d {name}", convolve, *inputs)
        yield _case(f"conv2d channels last {name}", partial(_channels_last, convolve), *inputs)
    yield _case("conv1d", partial(F.conv1d, padding=1), of(4, 16, 100), of(32, 16, 3, salt=1))
    yield _case("conv1d wide", partial(F.conv1d, padding=4), of(1, 64, 500), of(128, 64, 9, salt=1))
    yield _case("conv3d", partial(F.conv3d, padding=1), of(2, 8, 6, 6, 6), of(16, 8, 3, 3, 3, salt=1))
    turn = partial(F.conv_transpose2d, stride=2, padding=1)
    yield _case("conv_transpose2d", turn, of(4, 32, 8, 8), of(32, 16, 4, 4, salt=1))
    yield _case("conv_transpose2d wide", turn, of(1, 256, 7, 7), of(256, 128, 4, 4, salt=1))
    yield _case("conv_transpose1d", partial(F.conv_transpose1d, stride=2), of(2, 8, 20), of(8, 6, 4, salt=1))
    yield _case("unfold", lambda x: F.unfold(x, 3), of(2, 4, 9, 9))


def _channels_last(convolve: Function, x: Tensor, *rest: Tensor) -> Tensor:
    return convolve(x.contiguous(memory_format=torch.channels_last), *rest)


def _functions() -> Iterator[Case]:
    for name, function in UNARY.items():
        yield _case(name, function, spread(20011))
    for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "gelu", "silu", "softplus", "erf", "pow"):
        yield _case(f"{name} strided", partial(_strided, UNARY[name]), spread(3000))
    yield _case("prelu", F.prelu, of(4, 6, 5), of(6, salt=1))
    yield _case("glu", F.glu, of(30, 50))
    yield _case("div", torch.div, of(999), spread(999))
    yield _case("lerp", lambda a, b: torch.lerp(a, b, 0.37), of(999), of(999, salt=1))
    yield _case("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.3), of(999), of(999, salt=1))
    yield _case("addcdiv", lambda a, b: torch.addcdiv(a, a, b, value=0.3), of(999), spread(999))


def _strided(function: Function, x: Tensor) -> Tensor:
    return function(x.view(60, 50)[:, ::3])


def _reductions() -> Iterator[Case]:
    functions: dict[str, Function] = {
        "sum": torch.sum,
        "sum 0": lambda a: a.sum(0),
        "sum strided": lambda a: a[:, ::3].sum(1),
        "mean 1": lambda a: a.mean(1),
        "var 1": lambda a: a.var(1),
        "std 0": lambda a: a.std(0),
        "prod": lambda a: (1 + a / 1000).prod(1),
        "norm": torch.linalg.vector_norm,
        "norm 1": lambda a: torch.linalg.vector_norm(a, 1, dim=1),
        "norm 3": lambda a: torch.linalg.vector_norm(a, 3, dim=0),
        "logsumexp": lambda a: a.logsumexp(1),
        "softmax": lambda a: F.softmax(a, 1),
        "softmax 0": lambda a: F.softmax(a, 0),
        "log_softmax": lambda a: F.log_softmax(a, 1),
        "cumsum": lambda a: torch.cumsum(a, 1),
        "cumprod": lambda a: torch.cumprod(1 + a / 1000, 1),
        "logcumsumexp": lambda a: torch.logcumsumexp(a, 1),
        "amax": lambda a: a.amax(1),
        "normalize": lambda a: F.normalize(a, dim=1),
        "cosine_similarity": lambda a: F.cosine_similarity(a, a.roll(1, 0), dim=1),
    }
    for name, function in functions.items():
        yield _case(name, function, of(64, 1000))


def _norms() -> Iterator[Case]:
    rows, images, scale = of(64, 1000), of(8, 16, 14, 14), of(16, salt=1)
    yield _case("layer_norm", lambda a, w: F.layer_norm(a, (1000,), w), rows, of(1000, salt=1))
    yield _case("rms_norm", lambda a: F.rms_norm(a, (1000,)), rows)
    yield _case("group_norm", lambda a, w: F.group_norm(a, 4, w), images, scale)
    yield _case("instance_norm", F.instance_norm, images)
    yield _case("batch_norm", lambda a, w: F.batch_norm(a, None, None, w, training=True), images, scale)
    yield _case("batch_norm 1d", lambda a: F.batch_norm(a, None, None, training=True), rows)
    yield _case("local_response_norm", partial(F.local_response_norm, size=3), images)


def _losses() -> Iterator[Case]:
    def target() -> Tensor:
        return numbers(64, 100, salt=1)

    def classes() -> Tensor:
        return torch.arange(64) * 13 % 100

    def ctc(a: Tensor) -> Tensor:
        targets = (torch.arange(36) * 7 % 19 + 1).view(4, 9)
        return F.ctc_loss(F.log_softmax(a, 2), targets, torch.full((4,), 30), torch.full((4,), 9))

    functions: dict[str, Function] = {
        "cross_entropy": lambda a: F.cross_entropy(a, classes()),
        "cross_entropy smooth": lambda a: F.cross_entropy(a, classes(), label_smoothing=0.1),
        "nll_loss": lambda a: F.nll_loss(F.log_softmax(a, 1), classes()),
        "mse_loss": lambda a: F.mse_loss(a, target()),
        "l1_loss": lambda a: F.l1_loss(a, target()),
        "huber_loss": lambda a: F.huber_loss(a, target()),
        "bce": lambda a: F.binary_cross_entropy(torch.sigmoid(a), target().abs() / 2),
        "bce with logits": lambda a: F.binary_cross_entropy_with_logits(a, target().abs() / 2),
        "kl_div": lambda a: F.kl_div(F.log_softmax(a, 1), F.softmax(target(), 1), reduction="batchmean"),
    }
    for name, function in functions.items():
        yield _case(name, function, of(64, 100))
    yield _case("ctc_loss", ctc, of(30, 4, 20))


def _pools() -> Iterator[Case]:
    functions: dict[str, Function] = {
        "max_pool2d": lambda a: F.max_pool2d(a, 3, 2, 1),
        "avg_pool2d": lambda a: F.avg_pool2d(a, 3, 2, 1),
        "adaptive_avg_pool2d": lambda a: F.adaptive_avg_pool2d(a, 5),
        "adaptive_max_pool2d": lambda a: F.adaptive_max_pool2d(a, 5),
        "interpolate nearest": lambda a: F.interpolate(a, scale_factor=2),
        "interpolate bilinear": lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"),
        "pixel_shuffle": lambda a: F.pixel_shuffle(a, 2),
        "pad": lambda a: F.pad(a, (1, 2, 3, 4)),
        "grid_sample": lambda a: F.grid_sample(a, numbers(4, 9, 9, 2, salt=1) / 2, align_corners=False),
    }
    for name, function in functions.items():
        yield _case(name, function, of(4, 8, 14, 14))


def _indices() -> Iterator[Case]:
    def rows() -> Tensor:
        return torch.arange(2048) * 7 % 500

    table = of(500, 64)
    yield _case("embedding", lambda a: F.embedding(rows(), a), table)
    yield _case("embedding_bag", lambda a: F.embedding_bag(rows().view(64, 32), a, mode="mean"), table)
    weighted = partial(F.embedding_bag, mode="sum")
    yield _case(
        "embedding_bag weighted", lambda a, w: weighted(rows().view(64, 32), a, per_sample_weights=w), table, of(64, 32)
    )
    yield _case("index_select", lambda a: a.index_select(0, rows()), table)
    yield _case("gather", lambda a: a.gather(0, rows()[:1024].view(16, 64)), table)
    yield "index_add", lambda: torch.zeros(500, 64).index_add_(0, rows(), numbers(2048, 64))
    yield "scatter_add", lambda: torch.zeros(500, 64).scatter_add_(0, rows().view(32, 64), numbers(32, 64))
    yield "sort", lambda: list(torch.sort(numbers(10007)))
    yield "topk", lambda: list(torch.topk(numbers(64, 300), 10))


def _recurrent() -> Iterator[Case]:
    def trained(make: Callable[..., nn.Module], options: dict[str, Any]) -> list[Tensor]:
        module = filled(make(32, 48, **options))
        return [*with_gradients(lambda x: module(x)[0], of(8, 20, 32)), *gradients(module)]

    def asked(make: Callable[..., nn.Module]) -> Tensor:
        module = filled(make(32, 48, 2, batch_first=True))
        with torch.no_grad():
            return module(numbers(8, 20, 32))[0]  # type: ignore[no-any-return]

    def cell(make: Callable[..., nn.Module]) -> list[Tensor]:
        module = filled(make(20, 24))
        return [*with_gradients(lambda x: torch.cat(tuple(module(x))), of(6, 20)), *gradients(module)]

    for name, make in {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}.items():
        yield name, partial(trained, make, {"num_layers": 2, "batch_first": True})
        yield f"{name} bidirectional", partial(trained, make, {"bidirectional": True})
        yield f"{name} without gradients", partial(asked, make)
        yield f"{name} cell", partial(cell, {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}[name])
    yield "lstm projected", partial(trained, nn.LSTM, {"proj_size": 12})


def _optimizers() -> Iterator[Case]:
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=1e-2),
        "adamw": partial(torch.optim.AdamW, lr=1e-2),
        "adamw amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
        "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        "adamax": partial(torch.optim.Adamax, lr=1e-2),
        "nadam": partial(torch.optim.NAdam, lr=1e-2),
        "radam": partial(torch.optim.RAdam, lr=1e-1),
        "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
        "adadelta": torch.optim.Adadelta,
        "rmsprop": partial(torch.optim.RMSprop, lr=1e-2),
        "asgd": torch.optim.ASGD,
        "rprop": torch.optim.Rprop,
    }

    def steps(make: Callable[..., torch.optim.Optimizer]) -> Tensor:
        weight = nn.Parameter(numbers(64, 77))
        optimizer = make([weight])
        for step in range(5):
            weight.grad = numbers(64, 77, salt=step) * weight.detach()
            optimizer.step()
        return weight.detach()

    def clipped() -> list[Tensor]:
        weight = nn.Parameter(numbers(64, 77))
        weight.grad = numbers(64, 77, salt=1)
        return [nn.utils.clip_grad_norm_([weight], 1.0), weight.grad]

    for name, make in makes.items():
        yield name, partial(steps, make)
    yield "clip_grad_norm_", clipped


def _random() -> Iterator[Case]:
    draws: dict[str, Callable[[], Tensor]] = {
        "rand": lambda: torch.rand(1000),
        "randn": lambda: torch.randn(1000),
        "randn few": lambda: torch.randn(7),
        "randn float64": lambda: torch.randn(1000, dtype=torch.float64),
        "randint": lambda: torch.randint(1000, (1000,)),
        "randperm": lambda: torch.randperm(1000),
        "bernoulli": lambda: torch.full((1000,), 0.3).bernoulli(),
        "dropout": lambda: F.dropout(torch.ones(64, 1000), 0.3),
        "exponential": lambda: torch.empty(1000).exponential_(),
        "multinomial": lambda: torch.multinomial(numbers(8, 50).abs(), 20),
        "log_normal": lambda: torch.empty(1000).log_normal_(),
        "cauchy": lambda: torch.empty(1000).cauchy_(),
        "geometric": lambda: torch.empty(1000).geometric_(0.3),
        "poisson": lambda: torch.poisson(numbers(1000).abs() * 9),
        "gamma": lambda: torch._standard_gamma(numbers(1000).abs() + 0.1),
        "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(24, 20)),
        "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(24, 20)),
        "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(24, 20)),
    }

    def draw(function: Callable[[], Tensor]) -> Tensor:
        torch.manual_seed(5)
        return function()

    for name, function in draws.items():
        yield name, partial(draw, function)


def _precisions() -> Iterator[Case]:
    attend = F.scaled_dot_product_attention
    for word, dtype in _DTYPES:
        x, w = of(64, 256, dtype=dtype), of(128, 256, salt=1, dtype=dtype)
        q, k, v = (of(2, 4, 40, 32, salt=salt, dtype=dtype) for salt in range(3))
        images, kernel = of(4, 16, 14, 14, dtype=dtype), of(32, 16, 3, 3, salt=1, dtype=dtype)
        yield _case(f"linear {word}", F.linear, x, w)
        yield _case(f"linear bias {word}", F.linear, x, w, of(128, dtype=dtype))
        yield _case(f"linear odd {word}", F.linear, of(17, 301, dtype=dtype), of(33, 301, salt=1, dtype=dtype))
        yield _case(f"bmm {word}", lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT), q, k)
        yield _case(f"mv {word}", torch.mv, x, of(256, salt=2, dtype=dtype))
        yield _case(f"conv2d {word}", partial(F.conv2d, padding=1), images, kernel)
        yield _case(f"attention {word}", attend, q, k, v)
        yield _case(f"attention long {word}", attend, *(of(1, 2, 300, 64, salt=n, dtype=dtype) for n in range(3)))
        for name in ("sigmoid", "gelu", "softplus", "pow"):
            yield _case(f"{name} {word}", UNARY[name], spread(4001, dtype))
        yield _case(f"softmax {word}", lambda a: F.softmax(a, 1), x)
        yield _case(f"layer_norm {word}", lambda a: F.layer_norm(a, (256,)), x)
    for word, dtype in _DTYPES:
        for name in ("exp", "log", "log2", "log10", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "tanh", "erf"):
            yield _case(f"{name} {word}", UNARY[name], spread(4001, dtype))
    yield "autocast bfloat16", _autocast


def _autocast() -> list[Tensor]:
    model = filled(nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 16)))
    with torch.autocast("cpu", torch.bfloat16):
        result = model(numbers(64, 256))
    result.float().square().mean().backward()
    return [result, *gradients(model)]


def _algebra() -> Iterator[Case]:
    def square() -> Tensor:
        return numbers(24, 24) / 8 + torch.eye(24)

    def positive() -> Tensor:
        return (square()[:, :, None] * square().mT[None]).sum(1) + torch.eye(24)

    def signal() -> Tensor:
        return numbers(8, 250)

    real = torch.view_as_real
    functions: dict[str, tuple[Callable[..., Any], Input]] = {
        "cholesky": (torch.linalg.cholesky, positive),
        "cholesky upper": (partial(torch.linalg.cholesky, upper=True), positive),
        "solve": (lambda x: torch.linalg.solve(x, x.roll(1, 0)), square),
        "inv": (torch.linalg.inv, square),
        "det": (torch.linalg.det, square),
        "qr": (torch.linalg.qr, square),
        "svd": (torch.linalg.svd, square),
        "eig": (lambda x: real(torch.linalg.eigvals(x)), square),
        "eigh": (torch.linalg.eigh, positive),
        "matrix_exp": (lambda x: torch.linalg.matrix_exp(x / 4), square),
        "triangular_solve": (lambda x: torch.linalg.solve_triangular(x.triu(), x, upper=True), square),
        "fft": (lambda x: real(torch.fft.fft(x)), signal),
        "rfft2": (lambda x: real(torch.fft.rfft2(x)), signal),
        "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), signal),
        "stft": (lambda x: real(torch.stft(x, 32, window=torch.ones(32).to(x), return_complex=True)), signal),
        "complex mm": (lambda x: real(torch.complex(x, x.mT.contiguous()) @ torch.complex(x, x)), square),
        "sparse mm": (lambda x: torch.mm(torch.where(x > 0.1, x, 0).to_sparse(), x), square),
    }
    for name, (function, make) in functions.items():
        for word, dtype in (("", torch.float32), (" float64", torch.float64)):
            yield name + word, partial(_all_of, function, make, dtype)


def _all_of(function: Callable[[Tensor], Any], make: Input, dtype: torch.dtype) -> list[Tensor]:
    found = function(make().to(dtype))
    return [found] if isinstance(found, Tensor) else list(found)
