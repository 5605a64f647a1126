"""Convolutions on Hopper's tensor cores: cuda/conv/sm90."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxconv._plan.plan import Device, Plan, align, extent_of, itemsize
from jaxconv._problem import ConvProblem, DenseProblem


def wgmma_refusal(p: ConvProblem | DenseProblem, device: Device) -> str | None:
    if device.platform != "cuda" or device.compute_capability != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    if p.dtype == "float64":
        return "it needs float32, bfloat16 or float16, got float64"
    return None


def wgmma_conv_refusal(op: str, p: ConvProblem, device: Device) -> str | None:
    """cuda/conv/sm90/conv_sm90.h: what the copy engine can walk."""
    refusal = wgmma_refusal(p, device)
    if refusal:
        return refusal
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    if group_c % 8 or group_k % 8:
        return f"it needs multiples of 8 channels a group, got {group_c} and {group_k}"
    dgrad, strided = op == "conv_dgrad", math.prod(p.stride) > 1
    gathered = [group_k] + [group_c] * strided if dgrad else [group_c]
    if p.groups > 1 and any(c % 64 for c in gathered):
        return f"with groups it needs multiples of 64 channels a group, got {group_c} and {group_k}"
    taps = math.prod(p.filter)
    rows = p.batch * max(math.prod(p.in_spatial), math.prod(p.out_spatial))
    terms = 3 if p.dtype == "float32" else 1  # a coordinate counts those of all terms
    if terms * max(rows, taps * max(p.in_channels, p.out_channels)) >= 2**31 - 4096:
        return f"it needs fewer than 2^31 / {terms} pixels and filter elements per channel"
    if op == "conv_statistics" and p.dtype == "float32":
        return "its epilogue sums up bfloat16 and float16 results only"
    if op == "conv_statistics" and -(-group_k // 64) * p.groups > device.sm_count:
        return f"with statistics a multiprocessor must have a column of tiles of its own, got {p.out_channels} channels"
    if p.pointwise and (p.dtype != "float32" or op not in ("conv_dgrad", "conv_wgrad")):
        return None
    corner, reach = {1: (32768, 65535), 2: (128, 255), 3: (16, 31)}[p.nd]
    for size, f, out, s, d, (low, high) in zip(
        p.in_spatial, p.filter, p.out_spatial, p.stride, p.dilation, p.padding, strict=True
    ):
        window = (f - 1) * d
        if dgrad:
            walked = max(abs(low), abs(high), abs(window - low), abs(window - high)) < corner - 2
        else:
            walked = s <= 8 and all(-corner <= c < corner for c in (-low, (out - 1) * s - low + 1 - size))
        if window >= reach or not walked:
            return "its padding, stride or dilated filter is beyond the copy engine's range"
    return "it needs strides of at most 8 together" if dgrad and math.prod(p.stride) > 8 else None


LETTERS = {"s": "_swapped", "r": "resident", "p": "wgrad_pair"}


def named(op: str, p: ConvProblem | DenseProblem, tile: str) -> tuple[str, str]:
    """(kernel, tile)."""
    conv_wgrad = op == "conv_wgrad"
    if tile in ("halo", "planes", "128x128h"):
        return {"halo": "sm90/halo", "planes": "sm90/halo_3d", "128x128h": "sm90/halo_stream"}[tile], ""
    if op == "conv_statistics":
        return "sm90/statistics", tile
    size = tile.rstrip("srp")
    if tile.endswith("r"):
        return "sm90/resident", size
    if tile.endswith("p"):
        return "sm90/wgrad_pair", size
    if isinstance(p, DenseProblem) and tile == "64x128":
        return "sm90/rows", size
    swapped = "_swapped" if tile.endswith("s") else ""
    if not conv_wgrad:
        return f"sm90/product{swapped}", size
    if p.dtype != "float32":
        return f"sm90/wgrad{swapped}", size
    if terms_of(p) == 1:
        return "sm90/wgrad_tf32", size
    return ("sm90/wgrad" if tile in TERMS_TILES else f"sm90/wgrad_terms{swapped}"), size


def legacy(kernel: str, tile: str) -> str:
    member = kernel.partition("/")[2]
    if member in ("halo", "halo_3d", "halo_stream"):
        return {"halo": "halo", "halo_3d": "planes", "halo_stream": "128x128h"}[member]
    return tile + (
        "r" if member == "resident" else "p" if member == "wgrad_pair" else "s" if member.endswith("_swapped") else ""
    )


# In 16 bit. Names in cuda/gemm/sm90_product.h: rows x columns of a CTA's outputs. "256x128s" has the filter on the
# tensor cores' rows. "halo" (cuda/conv/sm90/halo/halo.h) fetches a pixel once for all taps, "planes" (halo_3d.h) a
# plane of a volume once for all its neighbours; "128x128h" (halo_stream.h) keeps pixels while the filter passes.
# "64x256" is for few rows, "r": all of B's columns stay in shared memory (cuda/gemm/sm90_resident.cuh). "p": a pair of
# CTAs makes it, which fetch what they share once for both (cuda/conv/sm90/wgrad/wgrad.cuh); splits count pairs.
WGMMA_TILES = (
    *("128x256", "256x128", "128x128", "256x64", "256x128s", "128x320", "64x256", "halo", "planes", "128x128h"),
    *("128x64r", "64x256r"),
    *("256x256p", "256x128p", "128x256p", "256x64p", "64x256p"),
)


WGRAD_TILES = ("64x256", *(tile for tile in WGMMA_TILES if tile.endswith("p")))


SHARED_X = ("128x256p", "64x256p")  # pairs that share x, which the copy engine gives to both of a plain product only


RESIDENT_TILES = {"128x64r": (4, 128, 64), "64x256r": (2, 64, 256)}  # warpgroups; rows and columns of each


# Of a dgrad that adds on its way
ADDEND_TILES = ("128x256", "256x128", "128x128", "256x64", "128x320", "128x64r", "64x256r")


# Of dense; "64x128" has parts of K (cuda/gemm/sm90_rows.cuh).
WGMMA_DENSE_TILES = (
    *("128x256", "256x128", "128x128", "256x64", "256x128s", "128x320"),
    *("64x128", "128x64r", "64x256r"),
)


# In TF32; a weight gradient's are cuda/conv/sm90/wgrad/wgrad_tf32.h's.
TF32_TILES = ("128x256", "128x128", "256x64", "halo")


TF32_WGRAD_TILES = ("halo", "256x128", "128x256", "256x64")


# Of float32 as terms. Weight gradients split their operands in memory before, or with 256 rows on their way; the rows
# of "s" are channels of dy.
TERMS_TILES = ("128x128", "128x64")


TERMS_WGRAD_TILES = (*TERMS_TILES, "256x128", "256x64", "256x64s")


TF32_HALO = (9 * 64, 64)


def wgmma_tile_refusal(op: str, tile: str, p: ConvProblem) -> str | None:
    """What only some tiles need: None, or why `tile` cannot run `op` of a problem that wgmma supports."""
    if p.dtype == "float32":
        if terms_of(p) > 1:
            if tile not in (TERMS_WGRAD_TILES if op == "conv_wgrad" else TERMS_TILES):
                return "float32 does not have it"
            return "it needs a 1x1 convolution of stride 1" if tile == "256x64s" and not _plain(p) else None
        if tile not in (TF32_WGRAD_TILES if op == "conv_wgrad" else TF32_TILES):
            return "float32 does not have it"
        if op == "conv_wgrad":
            return _tf32_halo_refusal(p) if tile == "halo" else None
    if tile == "planes":
        return _planes_refusal(op, p)
    if tile == "128x128h":
        return _stream_refusal(op, p)
    if tile in WGRAD_TILES:
        if op != "conv_wgrad":
            return "only weight gradients have it"
        return "it needs a 1x1 convolution of stride 1" if tile in SHARED_X and not _plain(p) else None
    if op == "conv_wgrad" and tile in ("256x128", "128x128"):
        return "weight gradients do not have it"
    if tile in RESIDENT_TILES:
        if op == "conv_wgrad" or not _plain(p):
            return "it needs a 1x1 convolution of stride 1, and not its weight gradient"
        c, k = p.in_channels // p.groups, p.out_channels // p.groups
        return resident_refusal(tile, *((c, k) if op == "conv_dgrad" else (k, c)), p.groups)
    if tile != "halo":
        return None
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    summed, made = (group_k, group_c) if op == "conv_dgrad" else (group_c, group_k)
    if math.prod(p.stride) != 1 or summed > 64 or (p.groups > 1 and (summed != 64 or made % 64)):
        return "it needs stride 1 and at most 64 summed channels, with groups 64"
    taps, reach, pitch = math.prod(p.filter), 0, 1
    for size, out, f, d, (low, high) in reversed(
        list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True))
    ):
        if op == "conv_dgrad":
            size, out, low, high = out, size, (f - 1) * d - low, (f - 1) * d - high
        if low < 0:
            return "it takes no negative padding"
        reach += (f - 1) * d * pitch
        pitch *= max(size + max(low, high), out)
    if pitch * p.batch >= 2**31 - 4096:
        return "it needs fewer than 2^31 pixels and gaps"

    def buffer(places: int) -> int:
        return (places + reach + 7) // 8 * 8 * 128

    if op == "conv_wgrad":
        if p.filter[-2:] != (3, 3) or taps != 9:
            return "it needs a 3x3 filter"
        needed = 2 * (buffer(128) + 128 * 128) + 128
    else:
        if taps > 16:
            return "it takes at most 16 taps"
        if p.dtype == "float32":
            needed = taps * (2 if summed > 32 else 1) * 8192 + 2 * buffer(128) + 64
        else:
            needed = taps * 8192 + 2 * buffer(256) + 8192 + 128
    return "its pixels do not fit shared memory" if needed > 227 * 1024 else None


def _tf32_halo_places(p: ConvProblem) -> int:
    """Pixels and gaps of the line of a halo tile in TF32, MakeTf32Halo in cuda/conv/sm90/conv_sm90.cc."""
    places = p.batch
    for size, out, f, d, (low, _) in zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True):
        places *= max(size + low, out + (f - 1) * d - low, out)
    return places


def _tf32_halo_refusal(p: ConvProblem) -> str | None:
    """MakeTf32Halo in cuda/conv/sm90/conv_sm90.cc, and what fits shared memory beside dy."""
    if p.filter[-2:] != (3, 3) or math.prod(p.filter[:-2]) > 3 or math.prod(p.stride) != 1 or p.dilation[-1] != 1:
        return "it takes up to 3 planes of 3x3 taps, stride 1, no dilation along rows"
    if any(low < 0 for low, _ in p.padding):
        return "it takes no negative padding"
    if 3 * _tf32_halo_places(p) >= 2**31 - 4096:  # with the planes that the last ones read
        return "it needs fewer than 2^31 pixels and gaps"
    size, out, (low, _) = p.in_spatial[-1], p.out_spatial[-1], p.padding[-1]
    reach = 2 * (p.dilation[-2] * max(size + low, out + 2 - low) + 1)
    slots = (227 * 1024 - (192 * 256 + 4 * 8192) - 768) // 256 // 32
    return "its pixels do not fit shared memory" if slots < -(-(64 + reach) // 32) else None


def _planes_refusal(op: str, p: ConvProblem) -> str | None:
    """cuda/conv/sm90/halo_3d/halo_3d.h."""
    if p.nd != 3 or math.prod(p.stride) != 1 or p.groups != 1 or p.filter[0] != 3 or p.dilation[0] != 1:
        return "it needs three axes, stride 1, one group and three planes of taps, not dilated"
    extents = list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.padding, strict=True))
    if op == "conv_dgrad":
        extents = [(o, i, f, d, ((f - 1) * d - low, (f - 1) * d - high)) for i, o, f, d, (low, high) in extents]
    (_, planes, _, _, (ahead, _)), (height, rows, r, dil_r, pad_r), (width, columns, s, dil_s, pad_s) = extents
    if ahead > 2 or pad_r[0] < 0 or pad_s[0] < 0:
        return "it takes no negative padding, and padding of planes below 3"
    pitch = max(width + max(pad_s), columns)
    row, column = dil_r * pitch, dil_s
    if p.batch * planes * max(height + max(pad_r), rows + 400) * pitch >= 2**30:
        return "it needs fewer than 2^30 pixels and gaps"
    if op == "conv_wgrad":
        if p.filter != (3, 3, 3):
            return "it needs a 3x3x3 filter"
        tiles = -(-(rows * pitch + 2 * column) // 384)
        last = -(-tiles * 384 // pitch)
        if last + 2 * dil_r + 2 - pad_r[0] - height >= 16 or last + 1 - rows >= 16 or 2 * column > pitch:
            return "its rows are too short, or too few for their padding"
        x, dy = (-(-(384 + reach) // 16) * 16 for reach in (2 * (row + column), 2 * column))
        fits = x <= 1024 and (3 * x + 3 * dy) * 64 + 2176 <= 227 * 1024
        return None if fits else "its planes do not fit shared memory"
    summed = p.out_channels if op == "conv_dgrad" else p.in_channels
    if summed > 64 or r * s > 16:
        return "it takes at most 64 summed channels and 16 taps in a plane"
    if max(*pad_r, *pad_s) >= 16:
        return "it takes less than 16 of padding"
    place = 32 if summed <= 16 else 64 if summed <= 32 else 128  # bytes
    x = -(-(256 + (r - 1) * row + (s - 1) * column) * place // 1024) * 1024
    fits = x <= 1024 * place and r * s * 96 * place + 2 * x + 256 <= 227 * 1024
    return None if fits else "its planes do not fit shared memory"


def _stream_refusal(op: str, p: ConvProblem) -> str | None:
    """cuda/conv/sm90/halo_stream/halo_stream.h."""
    strided = math.prod(p.stride) > 1
    if p.nd > 2 or p.groups != 1 or op not in ("conv", "conv_fprop", "conv_dgrad") or (strided and op != "conv_dgrad"):
        return "it needs at most two axes, one group and stride 1, or a dgrad"
    if math.prod(p.filter) > 32:
        return "it takes at most 32 taps"
    summed = p.out_channels if op == "conv_dgrad" else p.in_channels
    reach, places, pitch = 0, p.batch, 1
    for size, out, f, d, s, (low, high) in reversed(
        list(zip(p.in_spatial, p.out_spatial, p.filter, p.dilation, p.stride, p.padding, strict=True))
    ):
        if op == "conv_dgrad":  # at most; a phase of a strided dgrad reads less
            size, out, low, high = out, -(-size // s), (f - 1) * d - low, (f - 1) * d - high
            window = -(-((f - 1) * d + max(-low, 0)) // s)
            low = -(-max(low, 0) // s)
            extent = max(size + low + max(-(-high // s), 0), out)
        elif low < 0:
            return "it takes no negative padding"
        else:
            window, extent = (f - 1) * d, max(size + max(low, high), out)
        reach += window * pitch
        pitch *= extent
        places *= extent
    if places >= 2**31 - 4096:
        return "it needs fewer than 2^31 pixels and gaps"
    rows, blocks = -(-(128 + reach) // 8) * 8, -(-summed // 64)
    fits = rows <= 1024 and blocks <= 12 and blocks * rows * 128 + 3 * 2 * 8192 + 1024 <= 227 * 1024
    return None if fits else "its pixels do not fit shared memory"


def _plain(p: ConvProblem) -> bool:
    """A convolution that is a matrix product as it lies."""
    return p.pointwise and set(p.stride) == {1}


def resident_refusal(tile: str, n: int, k: int, instances: int) -> str | None:
    """Shared memory: all of k for a tile's columns, 16 KiB on their way out and two stages a warpgroup."""
    groups, rows, columns = RESIDENT_TILES[tile]
    needed = -(-k // 64) * columns * 128 + groups * 16384 + 2 * groups * rows * 128
    if needed > 226 * 1024:
        return f"its columns need {needed} bytes of shared memory"
    return "it has at most 64 columns of tiles" if -(-n // columns) * instances > 64 else None


def resident_tile(rows: int, n: int, k: int, instances: int, device: Device) -> str | None:
    """The tile of a product that moves bytes, as measured on an H200."""
    tile = "128x64r" if n <= 64 else "64x256r"
    _, height, width = RESIDENT_TILES[tile]
    tiles = -(-rows // height) * -(-n // width) * instances
    # Columns that the last tile computes for nothing matter less than the epilogues of other tiles where k is short:
    # 24 to 144 channels 56x56 at batch 256 take .087 ms (128x128: .177), 96 to 576 at 14x14 .0227 (.0248).
    waste = -(-n // width) * width / n
    fits = resident_refusal(tile, n, k, instances) is None and (n <= 64 or waste <= (1.8 if k <= 96 else 1.25))
    return tile if fits and tiles >= 8 * device.sm_count else None


def wgmma_time(
    tile: str, rows: int, columns: int, steps: int, instances: int, saves_z: bool, device: Device, shows: float
) -> float:
    """How long a product takes, in any unit, from what an H200 did (docs/performance.md): waves of tiles, and what of
    the epilogue shows. The groups of 128x128 take turns, which hides it behind 9 steps; the others show `shows`."""
    m, n = _extent(tile)
    waves = -(-(-(-rows // m) * -(-columns // n) * instances) // device.sm_count)
    if tile == "128x128":
        return waves * m * n * max(1.03 * steps, 12 if saves_z else 9)
    return waves * m * n * (0.98 * steps + shows)


def wgmma_conv_tile(op: str, p: ConvProblem, device: Device) -> str:
    """As measured on an H200 (docs/performance.md)."""
    taps, group_c, group_k = math.prod(p.filter), p.in_channels // p.groups, p.out_channels // p.groups
    dgrad = op == "conv_dgrad"
    n, summed = (group_c, group_k) if dgrad else (group_k, group_c)
    if terms_of(p) > 1:
        return _terms_wgrad_tile(p) if op == "conv_wgrad" else "128x64" if n <= 64 else "128x128"
    if op == "conv_wgrad" and p.dtype == "float32":
        return _tf32_wgrad_tile(p)
    few = max(n, summed) <= 64 and (op == "conv_wgrad" or min(n, summed) <= 32)
    if p.nd == 3 and taps > 9 and few and wgmma_tile_refusal(op, "planes", p) is None:
        return "planes"
    halo = summed > 16 if p.dtype != "float32" else summed > 32 and n <= 64
    if halo and taps > 1 and wgmma_tile_refusal(op, "halo", p) is None:
        return "halo"
    rows = p.batch * math.prod(p.in_spatial if dgrad else p.out_spatial)
    plain = _plain(p) and p.dtype != "float32"
    if plain and op != "conv_wgrad":
        tile = resident_tile(rows, n, summed, p.groups, device)
        if tile:
            return tile
    pair = _pair_tile(p, device) if op == "conv_wgrad" and taps == 1 else None
    if pair:
        return pair
    if n <= 64:
        return "256x64"
    # The phases of a strided dgrad share their pixels, and 128 channels are too few to hide a tile's loads: worth some
    # gaps between rows and images.
    gaps = math.prod(1 + max(pads) / size for size, pads in zip(p.in_spatial, p.padding, strict=True))
    loads = max(n, summed) <= 128 and taps > 4 and gaps < 1.04
    shares = taps > 1 if dgrad and math.prod(p.stride) > 1 else loads
    if shares and summed > 64 and wgmma_tile_refusal(op, "128x128h", p) is None:
        return "128x128h"
    if op == "conv_wgrad":
        if taps * -(-group_c // 64) == 1:
            return "64x256"
        wide = -(-n // 320) * 320 < -(-n // 256) * 256
        if taps == 1 and n >= 256 and not wide:  # 256 of the side that has fewer channels
            return "128x256" if plain and (group_c <= 128 or group_c > n) else "256x128s"
        return "128x320" if wide else "256x128s" if n < 256 else "128x256"
    steps = taps * -(-summed * itemsize(p) // 128)
    if steps <= 9 or (dgrad and math.prod(p.stride) > 1):
        return "128x128"
    wide = (["128x256", "256x128s"] if plain else ["256x128s", "128x256"]) if n > 128 else ["256x128s"]
    if p.dtype == "float32":
        wide = ["128x256"] * (n > 128)
    elif n > 256:
        wide.append("128x320")
    saves_z = op == "conv" and p.save_preactivation

    def time(tile: str) -> float:
        return wgmma_time(tile, rows, n, steps, p.groups, saves_z, device, 2 if saves_z else 0.5)

    return min([*wide, "128x128"], key=time)


def _pair_tile(p: ConvProblem, device: Device) -> str | None:
    """The pair of CTAs for a 1x1's weight gradient in 16 bit, as measured on an H200: one whose second tile is not
    empty, and that cuts the reduction into so many parts that small sums pay."""
    c, k, least = p.in_channels, p.out_channels, 4
    if not _plain(p):
        tile, least = "256x256p", 16
    elif k <= 64:
        tile = "256x64p"
    elif c <= 64:
        tile = "64x256p"
    else:
        tile = "256x128p" if k <= 128 else "128x256p"
    rows, columns = -(-c // _extent(tile)[0]), -(-k // _extent(tile)[1])
    used = c * k >= 0.8 * rows * columns * math.prod(_extent(tile))
    return tile if p.groups == 1 and used and device.sm_count // 2 >= least * rows * columns else None


def _tf32_wgrad_tile(p: ConvProblem) -> str:
    """As measured on an H200: a halo tile takes 1550 cycles for 32 places, 256x128 takes 1620 for 32 pixels. The other
    two are for few rows or columns."""
    group_k, pixels = p.out_channels // p.groups, p.batch * math.prod(p.out_spatial)
    blocks = math.prod(p.filter) * -(-p.in_channels // p.groups // 64)
    other = "256x64" if group_k <= 64 else "128x256" if blocks <= 2 and group_k > 128 else "256x128"
    halo = 1550 * _tf32_halo_places(p) * _wgrad_tiles("halo", p)
    worth = halo < (1000 if group_k <= 64 else 1620) * pixels * _wgrad_tiles(other, p)
    return "halo" if worth and wgmma_tile_refusal("conv_wgrad", "halo", p) is None else other


def _terms_wgrad_tile(p: ConvProblem) -> str:
    """As measured on an H200. The tiles with 256 rows split x and dy on their way, slower than products of terms in
    memory, which cost 10 bytes an element: that pays where there are few operations an element."""
    group_c, group_k = p.in_channels // p.groups, p.out_channels // p.groups
    narrow = group_k <= 64
    if p.flops >= (470 if narrow else 675) * (math.prod(p.x_shape) + math.prod(p.y_shape)):
        return "128x64" if narrow else "128x128"
    if _plain(p) and group_c <= 64 < group_k:
        return "256x64s"
    return "256x64" if narrow else "256x128"


def _extent(tile: str) -> tuple[int, int]:
    return extent_of(tile.rstrip("srp"))


def _wgrad_tiles(tile: str, p: ConvProblem) -> int:
    taps, blocks, group_k = math.prod(p.filter), -(-p.in_channels // p.groups // 64), p.out_channels // p.groups
    if tile == "halo":
        return math.prod(p.filter[:-2]) * blocks * -(-group_k // TF32_HALO[1]) * p.groups
    rows, columns = _extent(tile)
    if tile == "256x64s":
        return -(-group_k // rows) * -(-p.in_channels // p.groups // columns) * p.groups
    return -(-taps * blocks * 64 // rows) * -(-group_k // columns) * p.groups


def wants(op: str, p: ConvProblem, device: Device) -> Iterator[Plan]:
    p = p.folded(op in ("conv_dgrad", "conv_dgrad_add"))
    if wgmma_conv_refusal(op, p, device):
        yield Plan("native", "", "sm90/product", "128x128")
        return
    if op == "conv_statistics":
        # (mean, M2) in float32 of each channel in at most so many parts, and the parts' sizes
        steps = math.prod(p.filter) * -(-p.in_channels // p.groups // 64)
        yield Plan("native", "", "sm90/statistics", _statistics_tile(p, steps, device))
        return
    first = wgmma_conv_tile("conv_dgrad" if op == "conv_dgrad_add" else op, p, device)
    yield _plan_of(op, first, p, device)
    if op == "conv_dgrad_add":
        return
    for tile in WGMMA_TILES if p.dtype != "float32" else (*TF32_TILES, *TF32_WGRAD_TILES, *TERMS_WGRAD_TILES):
        if tile != first and wgmma_tile_refusal(op, tile, p) is None:
            yield _plan_of(op, tile, p, device)


def _plan_of(op: str, tile: str, p: ConvProblem, device: Device) -> Plan:
    return Plan("native", "", *named(op, p, tile), splits=_splits(tile, p, device) if op == "conv_wgrad" else 1)


def refusal(op: str, plan: Plan, p: ConvProblem, device: Device) -> str | None:
    p = p.folded(op in ("conv_dgrad", "conv_dgrad_add"))
    bare = "conv_dgrad" if op == "conv_dgrad_add" else op
    refused = wgmma_conv_refusal(bare, p, device)
    if refused or op == "conv_statistics":
        return refused
    tile = legacy(plan.kernel, plan.tile)
    if op == "conv_dgrad_add":
        if p.dtype == "float32":
            return "in float32 it takes no addend"
        if tile not in ADDEND_TILES:
            return f"{plan.kernel} takes no addend"
    return wgmma_tile_refusal(bare, tile, p)


def workspace(op: str, plan: Plan, p: ConvProblem) -> int:
    """Bytes."""
    p = p.folded(op in ("conv_dgrad", "conv_dgrad_add"))
    if op == "conv_statistics":
        parts = min(2 * -(-p.batch * math.prod(p.out_spatial) // 128), 512)
        return parts * (8 * p.out_channels + 4)
    tile = legacy(plan.kernel, plan.tile)
    if op != "conv_wgrad":
        return wgmma_workspace("conv_dgrad" if op == "conv_dgrad_add" else op, p, tile, 1)
    if tile == "halo" and p.dtype != "float32":
        blocks = -(-p.out_channels // p.groups // 64) * p.groups
        return blocks * plan.splits * 9 * 64 * 64 * 4
    if tile == "planes":
        blocks = -(-p.in_channels // 32) * -(-p.out_channels // 32)
        return blocks * plan.splits * 3 * 20 * 128 * 16
    return wgmma_workspace(op, p, tile, plan.splits)


def _splits(tile: str, p: ConvProblem, device: Device) -> int:
    """Parts of a weight gradient's pixels."""
    sms = device.sm_count // (2 if tile.endswith("p") else 1)  # or pairs of them
    if tile == "halo" and p.dtype != "float32":
        return max(sms // (-(-p.out_channels // p.groups // 64) * p.groups), 1)  # CTAs a block
    if tile == "planes":
        return max(sms // (-(-p.in_channels // 32) * -(-p.out_channels // 32)), 1)
    tiles = _wgrad_tiles(tile, p)
    aligned = tiles * (sms // tiles) if tiles <= sms else 0
    traffic = itemsize(p) * (math.prod(p.x_shape) + math.prod(p.y_shape))
    # CTAs that share all tiles' work evenly. A number that the tiles divide keeps a part within a tile; it wins unless
    # it leaves too many multiprocessors idle (less so where x and dy do not stay in the L2 cache). In TF32 6 % are.
    whole = aligned >= (0.95 if p.dtype == "float32" and not p.full_float32 else 0.85) * sms or (
        traffic > 72 * 2**20 and aligned >= sms // 2 and p.dtype != "float32"
    )
    return aligned if whole else sms


def _statistics_tile(p: ConvProblem, steps: int, device: Device) -> str:
    """As measured on an H200. Every multiprocessor has one column of tiles, which it shares with others."""
    group_k, rows = p.out_channels // p.groups, -(-p.batch * math.prod(p.out_spatial) // 128)
    if group_k <= 64:
        return "256x64"

    def tiles(columns: int) -> int:  # of the busiest multiprocessor
        return -(-rows // (device.sm_count // (-(-group_k // columns) * p.groups)))

    wide = group_k > 128 and steps > 1 and -(-group_k // 128) * p.groups <= device.sm_count
    return "128x256" if wide and 2 * tiles(256) <= tiles(128) else "128x128"


def terms_of(p: ConvProblem | DenseProblem) -> int:
    """bfloat16 terms that stand for an operand (cuda/gemm/sm90_operands.h); 1: it is read as it is, or as TF32."""
    if p.dtype != "float32":
        return 1
    return 3 if p.full_float32 else 1


def wgmma_workspace(op: str, p: ConvProblem | DenseProblem, tile: str, splits: int) -> int:
    """Bytes: partial sums, and what stands for float32 operands (cuda/conv/sm90/conv_sm90.h, cuda/dense/sm90.h)."""
    if isinstance(p, DenseProblem) and tile == "64x128":
        return splits * (p.batch or 1) * p.m * p.n * 4
    size = 0
    if splits > 1:
        size = 2 * splits * math.prod(TF32_HALO if tile == "halo" else _extent(tile)) * 4
    if p.dtype != "float32":
        return size
    x, w = math.prod(p.x_shape), math.prod(p.w_shape)
    terms = terms_of(p)
    if isinstance(p, DenseProblem):
        copied = [w] if terms > 1 else [x] * p.trans_x + [w] * (not p.trans_w)
    elif op == "conv_wgrad":
        copied = [x, math.prod(p.y_shape)] if terms > 1 and tile in TERMS_TILES else []
    elif terms > 1:
        copied = [w]
    else:
        copied = [] if op == "conv_dgrad" else [w]
    return size + sum(align((2 * terms if terms > 1 else 4) * count) for count in copied)
