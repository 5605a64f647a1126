"""Convolutions on Hopper's tensor cores: cuda/conv/sm90.

Which kernel and tile are wanted, and a weight gradient's parts. The numbers are what an H200 did
(docs/kernels/sm90.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan import domain
from jaxconv._plan.plan import Device, Plan, extent_of, itemsize
from jaxconv._problem import ConvProblem, DenseProblem

Choice = tuple[str, str]  # kernel of the family, tile

# Every kernel and tile (cuda/gemm/sm90_tiles.h, cuda/conv/sm90/wgrad/domain.h), for who forces one: what does not exist
# for the dtype or the operation is refused.
CLUSTERS = ("64x64", "64x128", "128x128")
PRODUCTS: tuple[Choice, ...] = (
    *(("product", tile) for tile in ("128x256", "256x128", "128x128", "256x64", "128x320", "128x64")),
    ("product_swapped", "256x128"),
    *(("resident", tile) for tile in ("128x64", "64x256")),
)
FEW_ROWS: tuple[Choice, ...] = tuple(("cluster", tile) for tile in CLUSTERS)
HALOS: tuple[Choice, ...] = (("halo", ""), ("halo_3d", ""), ("halo_stream", ""))
SUMS: tuple[Choice, ...] = (("sums", "64x256"), ("sums", "64x128"))
TF32_SUMS: tuple[Choice, ...] = (("sums", "128x128"), ("sums", "256x64"))
NORM_GRADIENTS: tuple[Choice, ...] = (("product", "128x128"), ("product", "256x64"))
STATISTICS: tuple[Choice, ...] = tuple(("statistics", tile) for tile in ("256x64", "128x128", "256x128", "128x256"))
NORMALISED: tuple[Choice, ...] = tuple(("normalised", tile) for tile in ("256x64", "128x128", "128x256"))
# 128x128 is that of a CTA: a pair makes 128x256
NORMALISED_WGRADS: tuple[Choice, ...] = tuple(("normalised", tile) for tile in ("128x256", "256x64", "128x128"))
WGRADS: tuple[Choice, ...] = (
    *(("wgrad", tile) for tile in ("128x256", "256x64", "128x320", "64x256", "128x128", "128x64")),
    ("wgrad_swapped", "256x128"),
    *(("wgrad_pair", tile) for tile in ("256x256", "256x128", "128x256", "256x64", "64x256")),
    *(("wgrad_tf32", tile) for tile in ("256x128", "128x256", "256x64")),
    *(("wgrad_terms", tile) for tile in ("256x128", "256x64")),
    ("wgrad_terms_swapped", "256x64"),
)
TF32_HALO = (9 * 64, 64)  # rows and columns of a weight gradient's tile in sm90/halo


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    if op not in ("conv_dgrad_sums", "conv_gradient", "conv_norm_gradient"):  # whose sums are of x's own channels
        p = domain.folded(p, op in ("conv_dgrad", "conv_dgrad_add"))
    if op in ("conv_statistics", "conv_add_statistics"):
        wanted, every = iter([("statistics", _statistics_tile(p, device))]), STATISTICS
    elif op == "conv_dgrad_sums":
        # All of its filter's columns in one tile read dy once; fewer fit where there are more channels of dy.
        own, first = (TF32_SUMS, p.out_channels > 128) if p.dtype == "float32" else (SUMS, p.in_channels % 256 == 0)
        wanted, every = iter(own if first else own[::-1]), own
    elif op == "conv_norm_gradient":
        wanted, every = _norm_gradients(p), (*SUMS, ("halo", ""), *NORM_GRADIENTS)
    elif op.startswith("conv_normalised"):
        # Columns that a tile computes for nothing cost less than reading and normalising x once more.
        narrow, wgrad = p.out_channels <= 64, op == "conv_normalised_wgrad"
        tile = "256x64" if narrow else "128x128" if p.out_channels <= 128 and not wgrad else "128x256"
        wanted, every = iter([("normalised", tile)]), NORMALISED_WGRADS if wgrad else NORMALISED
    elif op == "conv_wgrad":
        wanted, every = _wgrads(p, device), (*WGRADS, *HALOS)
    else:
        wanted, every = _products(op, p, device), (*PRODUCTS, *FEW_ROWS, *HALOS)
    seen: set[Choice] = set()
    for choices in (wanted, every):
        for kernel, tile in choices:
            if (kernel, tile) not in seen:
                seen.add((kernel, tile))
                splits = _splits(kernel, tile, p, device) if op in ("conv_wgrad", "conv_normalised_wgrad") else 1
                if kernel == "cluster":
                    splits = _cluster(tile, p, device)[1]
                yield Plan("native", "", f"sm90/{kernel}", tile, splits)


def terms_of(p: ConvProblem | DenseProblem) -> int:
    """bfloat16 terms that stand for an operand (cuda/gemm/sm90_operands.h); 1: it is read as it is, or as TF32."""
    return 3 if p.dtype == "float32" and p.full_float32 else 1


def _plain(p: ConvProblem) -> bool:
    """A convolution that is a matrix product as it lies."""
    return p.pointwise and set(p.stride) == {1}


# ---- fprop and dgrad


def _norm_gradients(p: ConvProblem) -> Iterator[Choice]:
    """Of dgrads that go back through a batch-norm."""
    single = p.dtype == "float32"
    if _plain(p) and not single:
        yield from SUMS if p.in_channels > 128 else SUMS[::-1]
    if math.prod(p.filter) > 1 and single and p.in_channels <= 64 and p.out_channels > 32:
        yield "halo", ""
    yield NORM_GRADIENTS[p.in_channels <= 64]


def _products(op: str, p: ConvProblem, device: Device) -> Iterator[Choice]:
    taps, group_c, group_k = math.prod(p.filter), p.in_channels // p.groups, p.out_channels // p.groups
    dgrad = op in ("conv_dgrad", "conv_dgrad_add", "conv_gradient")
    n, summed = (group_c, group_k) if dgrad else (group_k, group_c)
    if terms_of(p) > 1:
        yield "product", "128x64" if n <= 64 else "128x128"
        return
    single = p.dtype == "float32"
    if p.nd == 3 and taps > 9 and max(n, summed) <= 64 and min(n, summed) <= 32:
        yield "halo_3d", ""
    if taps > 1 and (summed > 32 and n <= 64 if single else summed > 16):
        yield "halo", ""
    rows = p.batch * math.prod(p.in_spatial if dgrad else p.out_spatial)
    plain = _plain(p) and not single
    if plain:
        tile = resident_tile(rows, n, summed, p.groups, device)
        if tile:
            yield "resident", tile
    if n <= 64:
        yield "product", "256x64"
    strided = dgrad and math.prod(p.stride) > 1
    if summed > 64 and n > 64 and (taps > 1 if strided else _loads(p, n, summed)):
        yield "halo_stream", ""
    steps = taps * -(-summed * itemsize(p) // 128)
    if not dgrad:
        cluster = min(CLUSTERS, key=lambda tile: _cluster(tile, p, device)[0])
        tiles = -(-rows // 128) * -(-n // 128) * p.groups
        if tiles < device.sm_count and _cluster(cluster, p, device)[1] > 1:
            yield "cluster", cluster
    if single and by_l2(device):
        apart = set(p.stride) != {1}
        own = ["128x128"] if strided and taps > 1 else tf32_tiles(n, rows, steps, p.groups, apart, device)
        yield from (("product", tile) for tile in own)
        return
    wide: list[Choice] = []
    if steps > 9 and not strided:
        if single:
            wide = [("product", "128x256")] * (n > 128)
        elif n <= 128:
            wide = [("product_swapped", "256x128")]
        else:
            wide = [("product", "128x256"), ("product_swapped", "256x128")]
            wide = wide if plain else wide[::-1]
            wide += [("product", "128x320")] * (n > 256)
    saves_z = op in ("conv", "conv_add") and p.save_preactivation

    def time(choice: Choice) -> float:
        return product_time(choice[1], rows, n, steps, p.groups, saves_z, device, 2 if saves_z else 0.5)

    yield from sorted([*wide, ("product", "128x128")], key=time)


def _cluster(tile: str, p: ConvProblem, device: Device) -> tuple[float, int]:
    rows, columns = p.batch * math.prod(p.out_spatial), p.out_channels // p.groups
    steps = math.prod(p.filter) * -(-p.in_channels // p.groups * itemsize(p) // 128)
    return cluster_time(tile, rows, columns, steps, p.groups, device)


def cluster_time(
    tile: str, rows: int, columns: int, steps: int, instances: int, device: Device, pairs: bool = False
) -> tuple[float, int]:
    """(how long sm90/cluster takes about, in microseconds; CTAs of a cluster): what is fetched, at 80 KB a microsecond
    and multiprocessor, then the exchange of the sums. pairs: clusters of two are taken to fill the device."""
    height, width = extent_of(tile)
    tiles = -(-rows // height) * -(-columns // width) * instances
    height = min(height, -(-rows // 8) * 8)  # that are fetched and summed up

    def time(splits: int) -> tuple[float, int]:
        # A cluster lives in one of the chip's groups of 14 to 18 multiprocessors: one of eight CTAs fits, or two.
        room = device.sm_count if pairs and splits == 2 else device.sm_count * (32 - splits) // 31
        waves = -(-tiles * splits // room)
        fetched = -(-steps // splits) * (height + width) * 128
        return waves * (3.0 + fetched / 80e3 + 0.1 * splits + height * width * 4 / 50e3), splits

    return min(time(splits) for splits in (1, 2, 4, 8) if splits <= max(steps // 2, 1))


def _loads(p: ConvProblem, n: int, summed: int) -> bool:
    """Whether halo_stream pays: 128 channels are too few to hide a tile's loads, which is worth some gaps between rows
    and images. The phases of a strided dgrad share their pixels: there it does wherever there are several taps."""
    gaps = math.prod(1 + max(pads) / size for size, pads in zip(p.in_spatial, p.padding, strict=True))
    return max(n, summed) <= 128 and math.prod(p.filter) > 4 and gaps < 1.04


def resident_tile(rows: int, n: int, k: int, instances: int, device: Device) -> str | None:
    """The tile of a product that moves bytes, where sm90/resident pays."""
    tile = "128x64" if n <= 64 else "64x256"
    height, width = extent_of(tile)
    tiles = -(-rows // height) * -(-n // width) * instances
    # Columns that the last tile computes for nothing matter less than the epilogues of other tiles where k is short:
    # 24 to 144 channels 56x56 at batch 256 take 0.087 ms (128x128: 0.177), 96 to 576 at 14x14 0.0227 (0.0248).
    waste = -(-n // width) * width / n
    pays = n <= 64 or waste <= (1.8 if k <= 96 else 1.25)
    return tile if pays and tiles >= 8 * device.sm_count else None


def product_time(
    tile: str, rows: int, columns: int, steps: int, instances: int, saves_z: bool, device: Device, shows: float
) -> float:
    """How long a product takes, in any unit: waves of tiles, and what of the epilogue shows. The groups of 128x128 take
    turns, which hides it behind 9 steps; the others show `shows`."""
    m, n = extent_of(tile)
    waves = -(-(-(-rows // m) * -(-columns // n) * instances) // device.sm_count)
    if tile == "128x128":
        return waves * m * n * max(1.03 * steps, 12 if saves_z else 9)
    return waves * m * n * (0.98 * steps + shows)


# Of a multiply-add in TF32, how much longer an H100 takes than in 128x256. Bytes of a tile's operands decide, which
# come from the L2 cache (docs/kernels/sm90.md).
_TF32_FACTORS = {"128x320": 0.82, "128x256": 1.0, "256x128": 1.08, "128x128": 1.4}


def by_l2(device: Device) -> bool:
    """Whether the bytes that TF32's tiles fetch decide which is the fastest.

    Not on an H200, whose 128x128 is as fast as 128x256.
    """
    return "H200" not in device.kind


def _tf32_time(tile: str, steps: int) -> float:
    """How long a tile of TF32 products takes, in product_time's unit."""
    shows = max(9 - steps, 0) if tile == "128x128" else 0.5
    return math.prod(extent_of(tile)) * (_TF32_FACTORS[tile] * steps + shows)


def tf32_tiles(n: int, rows: int, steps: int, instances: int, apart: bool, device: Device) -> list[str]:
    """The tiles of TF32 products, the fastest first.

    apart: the pixels are several steps apart, and 256 rows of such take too long.
    """

    def time(tile: str) -> float:
        m, columns = extent_of(tile)
        tiles = -(-rows // m) * -(-n // columns) * instances
        return -(-tiles // device.sm_count) * _tf32_time(tile, steps)

    return sorted(_tf32_candidates(n, steps, apart), key=time)


def _tf32_candidates(n: int, steps: int, apart: bool) -> Iterator[str]:
    if n > 256:
        yield "128x320"
    if n > 128:
        yield "128x256"
    if steps > 9 and not apart:
        yield "256x128"
    yield "128x128"


def _statistics_tile(p: ConvProblem, device: Device) -> str:
    """Every multiprocessor has one column of tiles, which it shares with others."""
    steps = math.prod(p.filter) * -(-p.in_channels // p.groups * itemsize(p) // 128)
    group_k, rows = p.out_channels // p.groups, -(-p.batch * math.prod(p.out_spatial) // 128)
    if group_k <= 64:
        return "256x64"
    if p.dtype == "float32":

        def time(tile: str) -> float:
            m, n = extent_of(tile)
            shared_by = max(device.sm_count // (-(-group_k // n) * p.groups), 1)
            return math.ceil(-(-rows // (m // 128)) / shared_by) * _tf32_time(tile, steps)

        candidates = _tf32_candidates(group_k, steps, set(p.stride) != {1})
        return min((tile for tile in candidates if tile != "128x320"), key=time)

    def tiles(columns: int) -> int:  # of the busiest multiprocessor
        return -(-rows // max(device.sm_count // (-(-group_k // columns) * p.groups), 1))

    wide = group_k > 128 and steps > 1 and -(-group_k // 128) * p.groups <= device.sm_count
    return "128x256" if wide and 2 * tiles(256) <= tiles(128) else "128x128"


# ---- wgrad


def _wgrads(p: ConvProblem, device: Device) -> Iterator[Choice]:
    if terms_of(p) > 1:
        yield _terms_wgrad(p)
        return
    if p.dtype == "float32":
        yield from _tf32_wgrads(p)
        return
    taps, group_c, n = math.prod(p.filter), p.in_channels // p.groups, p.out_channels // p.groups
    if p.nd == 3 and taps > 9 and max(n, group_c) <= 64:
        yield "halo_3d", ""
    if taps > 1 and group_c > 16:
        yield "halo", ""
    pair = _pair_tile(p, device) if taps == 1 else None
    if pair:
        yield "wgrad_pair", pair
    wide = -(-n // 320) * 320 < -(-n // 256) * 256
    if n <= 64:
        yield "wgrad", "256x64"
    elif taps * -(-group_c // 64) == 1:
        yield "wgrad", "64x256"
    elif taps == 1 and n >= 256 and not wide:  # 256 of the side that has fewer channels
        more = _plain(p) and (group_c <= 128 or group_c > n)
        yield ("wgrad", "128x256") if more else ("wgrad_swapped", "256x128")
    else:
        yield ("wgrad", "128x320") if wide else ("wgrad_swapped", "256x128") if n < 256 else ("wgrad", "128x256")


def _pair_tile(p: ConvProblem, device: Device) -> str | None:
    """The pair of CTAs for a 1x1: one whose second tile is not empty, and that cuts the reduction into so many parts
    that small sums pay."""
    c, k, least = p.in_channels, p.out_channels, 4
    if not _plain(p):
        tile, least = "256x256", 16
    elif k <= 64:
        tile = "256x64"
    elif c <= 64:
        tile = "64x256"
    else:
        tile = "256x128" if k <= 128 else "128x256"
    rows, columns = -(-c // extent_of(tile)[0]), -(-k // extent_of(tile)[1])
    used = c * k >= 0.8 * rows * columns * math.prod(extent_of(tile))
    return tile if p.groups == 1 and used and device.sm_count // 2 >= least * rows * columns else None


def _tf32_wgrads(p: ConvProblem) -> Iterator[Choice]:
    """sm90/halo takes 1550 cycles for 32 places, 256x128 takes 1620 for 32 pixels. The other two are for few rows or
    columns."""
    group_k, pixels = p.out_channels // p.groups, p.batch * math.prod(p.out_spatial)
    blocks = math.prod(p.filter) * -(-p.in_channels // p.groups // 64)
    other = "256x64" if group_k <= 64 else "128x256" if blocks <= 2 and group_k > 128 else "256x128"
    places = p.batch  # pixels and gaps of its line
    for size, out, f, d, (low, _) in zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True):
        places *= max(size + low, out + (f - 1) * d - low, out)
    halo = 1550 * places * _tile_count("halo", "", p)
    if halo < (1000 if group_k <= 64 else 1620) * pixels * _tile_count("wgrad_tf32", other, p):
        yield "halo", ""
    yield "wgrad_tf32", other


def _terms_wgrad(p: ConvProblem) -> Choice:
    """wgrad_terms splits x and dy on their way, slower than wgrad multiplies terms in memory, which cost 10 bytes an
    element: that pays where there are few operations an element."""
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    narrow = group_k <= 64
    if p.flops >= (470 if narrow else 675) * (math.prod(p.x_shape) + math.prod(p.y_shape)):
        return "wgrad", "128x64" if narrow else "128x128"
    if _plain(p) and group_c <= 64 < group_k:
        return "wgrad_terms_swapped", "256x64"
    return "wgrad_terms", "256x64" if narrow else "256x128"


def _tile_count(kernel: str, tile: str, p: ConvProblem) -> int:
    taps, blocks, group_k = math.prod(p.filter), -(-p.in_channels // p.groups // 64), p.out_channels // p.groups
    if kernel == "halo":
        return math.prod(p.filter[:-2]) * blocks * -(-group_k // TF32_HALO[1]) * p.groups
    rows, columns = extent_of(tile)
    if kernel == "wgrad_terms_swapped":
        return -(-group_k // rows) * -(-p.in_channels // p.groups // columns) * p.groups
    return -(-taps * blocks * 64 // rows) * -(-group_k // columns) * p.groups


def _splits(kernel: str, tile: str, p: ConvProblem, device: Device) -> int:
    """Parts of a weight gradient's pixels."""
    if kernel == "halo_stream":
        return 1
    if (kernel, tile) == ("normalised", "128x128"):
        kernel, tile = "wgrad_pair", "128x256"
    sms = device.sm_count // (2 if kernel == "wgrad_pair" else 1)  # or pairs of them
    if kernel == "halo" and p.dtype != "float32":
        return max(sms // (-(-p.out_channels // p.groups // 64) * p.groups), 1)  # CTAs a block
    if kernel == "halo_3d":
        return max(sms // (-(-p.in_channels // 32) * -(-p.out_channels // 32)), 1)
    tiles = _tile_count(kernel, tile, p)
    aligned = tiles * (sms // tiles) if tiles <= sms else 0
    traffic = itemsize(p) * (math.prod(p.x_shape) + math.prod(p.y_shape))
    # CTAs that share all tiles' work evenly. A number that the tiles divide keeps a part within a tile; it wins unless
    # it leaves too many multiprocessors idle (less so where x and dy do not stay in the L2 cache). In TF32 6 % are.
    whole = aligned >= (0.95 if p.dtype == "float32" and not p.full_float32 else 0.85) * sms or (
        traffic > 72 * 2**20 and aligned >= sms // 2 and p.dtype != "float32"
    )
    return aligned if whole else sms
