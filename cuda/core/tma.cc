// Tensor map descriptors by the driver's two encoding functions, found at the first use.
#include "cuda/core/tma.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/core/context.h"

namespace jaxconv::cuda {
namespace {

struct Driver {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;
  int version = 0;
  cudaError_t error = cudaSuccess;
};

template <typename F>
cudaError_t FindEntry(const char* name, F* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  *function = reinterpret_cast<F>(found);
  return cudaSuccess;
}

const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver d;
    d.error = FindEntry("cuTensorMapEncodeTiled", &d.tiled);
    if (d.error == cudaSuccess) d.error = FindEntry("cuTensorMapEncodeIm2col", &d.im2col);
    if (d.error == cudaSuccess) d.error = cudaDriverGetVersion(&d.version);
    return d;
  }();
  return driver;
}

struct Element {
  CUtensorMapDataType type;
  int bytes;
};
constexpr Element kByte = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

Element ElementOf(DType dtype, bool tf32) {
  const int bytes = int(SizeOf(dtype));
  switch (dtype) {
    case DType::kBF16:
      return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, bytes};
    case DType::kF16:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, bytes};
    default:
      return {tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, bytes};
  }
}

constexpr int kRowBytes = 128;  // of a box

struct Shape {
  cuuint64_t extent[5];
  cuuint64_t stride[4];  // bytes, from dimension 1 on
  int64_t span;          // bytes from the first element to past the last
};

Shape ShapeOf(int64_t bytes, const TmaTensor& t) {
  Shape s;
  s.span = bytes;
  for (int i = 0; i < t.rank; ++i) {
    s.extent[i] = cuuint64_t(t.extent[i]);
    if (i > 0) s.stride[i - 1] = cuuint64_t(t.stride[i] * bytes);
    s.span += (t.extent[i] - 1) * t.stride[i] * bytes;
  }
  return s;
}

// Drivers before 13.2 set a bit that promises the first 128 KiB to be mapped, whatever the tensor's
// size.
void ForgetLargeSpan(const Shape& s, CUtensorMap* map) {
  if (TheDriver().version < 13020 && s.span < 128 * 1024) {
    reinterpret_cast<uint64_t*>(map)[1] &= ~(uint64_t(1) << 21);
  }
}

Status Refused(const std::string& what, const char* kind, const TmaTensor& t, CUresult result) {
  std::string text = what + ": the driver refuses a " + kind + " descriptor (error " +
                     std::to_string(int(result)) + ") for extents";
  for (int i = 0; i < t.rank; ++i) text += " " + std::to_string(t.extent[i]);
  text += ", strides";
  for (int i = 1; i < t.rank; ++i) text += " " + std::to_string(t.stride[i]);
  return Status::Invalid(text);
}

CUtensorMapSwizzle SwizzleOf(int row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

Status EncodeBox(Element element, CUtensorMapSwizzle swizzle, const TmaTensor& tensor,
                 const int (&extent)[5], const std::string& what, CUtensorMap* map) {
  const Driver& driver = TheDriver();
  JAXCONV_RETURN_IF_ERROR(CudaStatus(driver.error, what + ": cuTensorMapEncodeTiled"));
  const Shape s = ShapeOf(element.bytes, tensor);
  cuuint32_t box[5], step[5];
  for (int i = 0; i < tensor.rank; ++i) {
    box[i] = cuuint32_t(extent[i]);
    step[i] = 1;
  }
  const CUresult result =
      driver.tiled(map, element.type, cuuint32_t(tensor.rank), const_cast<void*>(tensor.base),
                   s.extent, s.stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return Refused(what, "tiled", tensor, result);
  ForgetLargeSpan(s, map);
  return Status::Ok();
}

Status EncodeColumns(Element element, const TmaTensor& tensor, const TmaWalk& walk, int pixels,
                     const std::string& what, CUtensorMap* map, int row_bytes) {
  const Driver& driver = TheDriver();
  JAXCONV_RETURN_IF_ERROR(CudaStatus(driver.error, what + ": cuTensorMapEncodeIm2col"));
  const Shape s = ShapeOf(element.bytes, tensor);
  int lower[3] = {}, upper[3] = {};
  cuuint32_t step[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < tensor.rank - 2; ++i) {
    lower[i] = walk.first[i];
    upper[i] = int(UpperCorner(tensor.extent[i + 1], walk, i));
    step[i + 1] = cuuint32_t(walk.step[i]);
  }
  const CUresult result =
      driver.im2col(map, element.type, cuuint32_t(tensor.rank), const_cast<void*>(tensor.base),
                    s.extent, s.stride, lower, upper, cuuint32_t(row_bytes / element.bytes),
                    cuuint32_t(pixels), step, CU_TENSOR_MAP_INTERLEAVE_NONE, SwizzleOf(row_bytes),
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return Refused(what, "im2col", tensor, result);
  ForgetLargeSpan(s, map);
  return Status::Ok();
}

}  // namespace

Status EncodeTiled(DType dtype, const TmaTensor& tensor, const int (&rows)[5],
                   const std::string& what, CUtensorMap* map, bool tf32) {
  const int box[5] = {kRowBytes / int(SizeOf(dtype)), rows[1], rows[2], rows[3], rows[4]};
  return EncodeBox(ElementOf(dtype, tf32), CU_TENSOR_MAP_SWIZZLE_128B, tensor, box, what, map);
}

Status EncodePlain(DType dtype, const TmaTensor& tensor, const int (&box)[5],
                   const std::string& what, CUtensorMap* map, bool tf32) {
  return EncodeBox(ElementOf(dtype, tf32), CU_TENSOR_MAP_SWIZZLE_NONE, tensor, box, what, map);
}

Status EncodeSwizzled(DType dtype, const TmaTensor& tensor, const int (&box)[5],
                      const std::string& what, CUtensorMap* map, bool tf32) {
  return EncodeBox(ElementOf(dtype, tf32), SwizzleOf(box[0] * int(SizeOf(dtype))), tensor, box,
                   what, map);
}

Status EncodeIm2col(DType dtype, const TmaTensor& tensor, const TmaWalk& walk, int pixels,
                    const std::string& what, CUtensorMap* map, bool tf32, int row_bytes) {
  return EncodeColumns(ElementOf(dtype, tf32), tensor, walk, pixels, what, map, row_bytes);
}

Status EncodeBytes(const TmaTensor& tensor, const int (&box)[5], const std::string& what,
                   CUtensorMap* map) {
  return EncodeBox(kByte, SwizzleOf(box[0]), tensor, box, what, map);
}

Status EncodeBytesIm2col(const TmaTensor& tensor, const TmaWalk& walk, int pixels,
                         const std::string& what, CUtensorMap* map, int row_bytes) {
  return EncodeColumns(kByte, tensor, walk, pixels, what, map, row_bytes);
}

}  // namespace jaxconv::cuda
