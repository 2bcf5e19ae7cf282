// Implements launch.h: chooses the kernels and the number of blocks, and divides up the workspace.
#include <algorithm>
#include <limits>

#include "chunk.cuh"
#include "cuda/launch.h"
#include "double.cuh"
#include "rows.cuh"
#include "walks.h"

namespace fastcl::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int element_bytes(DType t) { return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2; }
unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kWarps)); }

const Walks& walks_for(const Problem& p) {
  const int dim = p.features <= 64 ? 0 : p.features <= 128 ? 1 : 2;
  switch (p.dtype) {
    case DType::kBFloat16:
      return kBFloat16Walks[dim];
    case DType::kFloat16:
      return kFloat16Walks[dim];
    default:
      return p.tf32 ? kTf32Walks[dim] : kFloat32Walks[dim];
  }
}

// Hands out pieces of the workspace. With base = null it only counts their bytes.
struct Carver {
  unsigned char* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = base != nullptr ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
};

// One walk: its kernel, its arguments, and the number of splits, which are runs of columns that separate blocks walk.
struct Plan {
  const Walk& walk;
  int splits;
  WalkArgs args{};
  Packing query{}, key{};

  // `forward`: the rows of the walk are queries; otherwise keys. `sums`: the walk multiplies weights with columns.
  Plan(const Problem& p, const Walk& kernel, bool forward, bool sums, Carver& carver) : walk(kernel) {
    args.rows = forward ? p.rows : p.columns;
    args.columns = forward ? p.columns : p.rows;
    args.features = static_cast<int32_t>(p.features);
    args.row_bytes = static_cast<int32_t>(ceil_div(p.features * element_bytes(p.dtype), 16) * 16);
    const int64_t tiles = std::max<int64_t>(1, ceil_div(args.columns, walk.columns));
    // Splits give every multiprocessor two blocks where rows alone do not. More splits would cost memory traffic: the
    // partial sums of each are written and read again.
    const int64_t row_blocks = std::max<int64_t>(1, ceil_div(args.rows, walk.rows));
    const int64_t wanted = std::clamp<int64_t>(2 * p.multiprocessors / row_blocks, 1, tiles);
    args.tiles_per_split = static_cast<int32_t>(ceil_div(tiles, wanted));
    splits = static_cast<int>(ceil_div(tiles, args.tiles_per_split));

    query = packing(p, p.query, p.rows, carver);
    key = packing(p, p.key, p.columns, carver);
    args.row_data = aligned(forward ? query : key);
    args.column_data = aligned(forward ? key : query);
    args.scale = static_cast<const float*>(p.scale);
    args.scale_step = p.one_scale ? 0 : 1;
    args.factor = static_cast<float>(p.factor);
    args.log2_factor = static_cast<float>(p.factor * 1.4426950408889634);
    args.bias = static_cast<const float*>(p.bias);
    args.offset = static_cast<const float*>(p.offset);
    args.cap = static_cast<const float*>(p.cap);
    args.row_id = forward ? p.row_id : p.col_id;
    args.column_id = forward ? p.col_id : p.row_id;
    if (forward) args.state = carver.take<float2>(splits * args.rows);
    if (sums) args.out = carver.take<float>(splits * args.rows * p.features);
  }

  Packing packing(const Problem& p, const void* data, int64_t rows, Carver& carver) const {
    const bool whole = p.features * element_bytes(p.dtype) == args.row_bytes;
    const bool ready = rows == 0 || (whole && reinterpret_cast<uintptr_t>(data) % 16 == 0);
    return {data, ready ? nullptr : carver.take<unsigned char>(rows * args.row_bytes), rows};
  }
  static const void* aligned(const Packing& p) { return p.to != nullptr ? p.to : p.from; }

  cudaError_t launch(const Problem& p, cudaStream_t stream) const {
    if (args.rows == 0) return cudaSuccess;
    const int64_t pieces =
        std::max(query.to != nullptr ? query.rows : 0, key.to != nullptr ? key.rows : 0) * (args.row_bytes / 16);
    if (pieces != 0) {
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>(ceil_div(pieces, kThreads), 16 * p.multiprocessors)), 2);
      const cudaError_t packed = FASTCL_LAUNCH(pack_rows, grid, dim3(kThreads), 0, stream, query, key, p.features,
                                               element_bytes(p.dtype), args.row_bytes);
      if (packed != cudaSuccess) return packed;
    }
    return walk.launch(args, splits, stream);
  }
};

Plan forward_plan(const Problem& p, const Outputs& o, Carver& carver) {
  const Walks& walks = walks_for(p);
  const bool softplus = p.reducer == Reducer::kSoftplusSum, sums = softplus || o.mean_key != nullptr;
  return Plan(p, softplus ? walks.softplus : sums ? walks.forward : walks.lse, true, sums, carver);
}

Plan backward_plan(const Problem& p, const Gradients& g, Carver& carver) {
  const bool softplus = p.reducer == Reducer::kSoftplusSum;
  Plan plan(p, softplus ? walks_for(p).sigmoid : walks_for(p).backward, false, true, carver);
  plan.args.lse = static_cast<const float*>(g.lse);
  plan.args.grad_lse = static_cast<const float*>(g.grad_lse);
  if (g.bias != nullptr) plan.args.extra = carver.take<float>(plan.splits * p.columns);
  return plan;
}

bool wants_columns(const Gradients& g) { return g.key != nullptr || g.bias != nullptr; }
bool wants_rows(const Gradients& g) { return g.query != nullptr || g.positive != nullptr || g.scale != nullptr; }

}  // namespace

int64_t largest_features(DType t) {
  return t == DType::kFloat64 ? std::numeric_limits<int64_t>::max() : t == DType::kFloat32 ? 128 : 256;
}

size_t forward_workspace(const Problem& p, const Outputs& o) {
  Carver carver{nullptr};
  if (p.dtype != DType::kFloat64 && p.features <= largest_features(p.dtype)) forward_plan(p, o, carver);
  return carver.used;
}

size_t backward_workspace(const Problem& p, const Gradients& g) {
  Carver carver{nullptr};
  if (p.dtype != DType::kFloat64 && p.features <= largest_features(p.dtype) && wants_columns(g))
    backward_plan(p, g, carver);
  return carver.used;
}

cudaError_t forward(const Problem& p, const Outputs& o, void* workspace, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat64) {
    return FASTCL_LAUNCH(forward_double, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), 0, stream, p, o);
  }
  if (p.features > largest_features(p.dtype)) return cudaErrorInvalidValue;
  Carver carver{static_cast<unsigned char*>(workspace)};
  const Plan plan = forward_plan(p, o, carver);
  const cudaError_t walked = plan.launch(p, stream);
  if (walked != cudaSuccess) return walked;
  return FASTCL_LAUNCH(finish_forward, dim3(blocks_for(p.rows)), dim3(kThreads), 0, stream, p, o, plan.args.state,
                       plan.args.out, plan.splits);
}

cudaError_t backward(const Problem& p, const Gradients& g, void* workspace, cudaStream_t stream) {
  const bool columns = wants_columns(g) && p.columns != 0;
  const int64_t row_blocks = wants_rows(g) ? blocks_for(p.rows) : 0;
  if (p.dtype == DType::kFloat64) {
    if (columns) {
      const cudaError_t walked =
          FASTCL_LAUNCH(backward_double, dim3(static_cast<unsigned>(p.columns)), dim3(kThreads), 0, stream, p, g);
      if (walked != cudaSuccess) return walked;
    }
    if (row_blocks == 0) return cudaSuccess;
    return FASTCL_LAUNCH((finish_backward<double>), dim3(static_cast<unsigned>(row_blocks)), dim3(kThreads), 0, stream,
                         p, g, nullptr, nullptr, 0, 0);
  }
  if (columns && p.features > largest_features(p.dtype)) return cudaErrorInvalidValue;
  const int64_t key_blocks = columns ? blocks_for(p.columns) : 0;
  if (key_blocks + row_blocks == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(key_blocks + row_blocks));
  if (!columns) {
    return FASTCL_LAUNCH((finish_backward<float>), grid, dim3(kThreads), 0, stream, p, g, nullptr, nullptr, 0, 0);
  }
  Carver carver{static_cast<unsigned char*>(workspace)};
  const Plan plan = backward_plan(p, g, carver);
  const cudaError_t walked = plan.launch(p, stream);
  if (walked != cudaSuccess) return walked;
  return FASTCL_LAUNCH((finish_backward<float>), grid, dim3(kThreads), 0, stream, p, g, plan.args.out, plan.args.extra,
                       plan.splits, key_blocks);
}

cudaError_t forward_chunk(const Problem& p, const Outputs& o, const Chunk& c, cudaStream_t stream) {
  if (p.dtype == DType::kFloat64) return cudaErrorInvalidValue;
  if (c.count == 0) return cudaSuccess;
  return FASTCL_LAUNCH(chunk_forward, dim3(static_cast<unsigned>(c.count)), dim3(kThreads), 0, stream, p, o, c);
}

cudaError_t backward_chunk(const Problem& p, const Gradients& g, const Chunk& c, cudaStream_t stream) {
  if (p.dtype == DType::kFloat64) return cudaErrorInvalidValue;
  if (c.count == 0 || p.columns == 0) return cudaSuccess;
  const int64_t rows_per_block = g.bias != nullptr ? c.count : std::max<int64_t>(16, ceil_div(c.count, 65535));
  const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, kThreads)),
                  static_cast<unsigned>(ceil_div(c.count, rows_per_block)));
  return FASTCL_LAUNCH(chunk_backward, grid, dim3(kThreads), 0, stream, p, g, c, rows_per_block);
}

}  // namespace fastcl::cuda
