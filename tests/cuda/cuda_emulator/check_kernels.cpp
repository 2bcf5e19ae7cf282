// The launchers against plain loops in float64, without torch, in buffers of exactly the size they need: for builds
// under sanitizers and with planted faults, and, compiled by nvcc, for compute-sanitizer on a GPU.
//
//   check_kernels [schedules] [types] [cases]
//
// types: any of f (float32), t (TF32), b (bfloat16), h (float16), d (float64); cases: digits, indices of kCases.
//
// Every case runs under that many schedules of the emulator (a GPU: as often), and all must agree bit for bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/device_shim.cuh"
#include "cuda/launch.h"

using namespace fastcl;
using namespace fastcl::cuda;

namespace {

int failed = 0, passed = 0;

void check(bool ok, const std::string& what) {
  (ok ? passed : failed) += 1;
  if (!ok) std::printf("FAIL %s\n", what.c_str());
}

// Memory that kernels use, of exactly this size, so that a sanitizer sees the first byte too many.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
#ifdef FASTCL_EMULATED
    data_ = std::malloc(bytes);
    std::memset(data_, 0xFF, bytes);
#else
    cudaMalloc(&data_, bytes + (bytes == 0));
    cudaMemset(data_, 0xFF, bytes);
#endif
  }
  explicit Buffer(const std::vector<char>& bytes) : Buffer(bytes.size()) {
#ifdef FASTCL_EMULATED
    std::memcpy(data_, bytes.data(), bytes_);
#else
    cudaMemcpy(data_, bytes.data(), bytes_, cudaMemcpyHostToDevice);
#endif
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
#ifdef FASTCL_EMULATED
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  void* get() const { return data_; }
  std::vector<char> read() const {
    std::vector<char> out(bytes_);
#ifdef FASTCL_EMULATED
    std::memcpy(out.data(), data_, bytes_);
#else
    cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost);
#endif
    return out;
  }

 private:
  void* data_;
  size_t bytes_;
};

size_t width(DType t) { return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2; }

void put(std::vector<char>& to, DType t, size_t i, double v) {
  char* at = to.data() + i * width(t);
  if (t == DType::kFloat64) std::memcpy(at, &v, 8);
  const float f = static_cast<float>(v);
  const __nv_bfloat16 b = __float2bfloat16(f);
  const __half h = __float2half(f);
  if (t == DType::kFloat32) std::memcpy(at, &f, 4);
  if (t == DType::kBFloat16) std::memcpy(at, &b, 2);
  if (t == DType::kFloat16) std::memcpy(at, &h, 2);
}

double get(const std::vector<char>& from, DType t, size_t i) {
  const char* at = from.data() + i * width(t);
  double d;
  float f;
  __nv_bfloat16 b;
  __half h;
  switch (t) {
    case DType::kFloat64:
      return std::memcpy(&d, at, 8), d;
    case DType::kBFloat16:
      return std::memcpy(&b, at, 2), __bfloat162float(b);
    case DType::kFloat16:
      return std::memcpy(&h, at, 2), __half2float(h);
    default:
      return std::memcpy(&f, at, 4), f;
  }
}

// Values as stored, and as stored again in float64.
struct Stored {
  std::vector<char> bytes;
  std::vector<double> value;
  Stored(size_t n, DType t, std::mt19937& rng, double size) : bytes(n * width(t)), value(n) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < n; ++i) {
      put(bytes, t, i, normal(rng) * size);
      value[i] = get(bytes, t, i);
    }
  }
};

std::vector<char> id_bytes(const std::vector<int64_t>& ids) {
  const char* p = reinterpret_cast<const char*>(ids.data());
  return std::vector<char>(p, p + 8 * ids.size());
}

struct Case {
  int64_t rows, columns, features;
  int multiprocessors;
  bool bias, ids;
};

// Small logits and few columns: a single wrong column must move a result far past its tolerance.
const Case kCases[] = {
    {1, 1, 1, 1, false, false},    {64, 64, 64, 1, false, false}, {20, 260, 64, 1, true, false},
    {65, 127, 40, 2, false, true}, {130, 193, 64, 2, true, true}, {33, 200, 100, 3, true, true},
    {70, 65, 128, 5, false, true}, {17, 90, 24, 1, true, true},
};

struct Names {
  DType dtype;
  bool tf32;
  const char* name;
};

void run(const Case& c, const Names& type, int schedules) {
  const DType t = type.dtype, wide = t == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const size_t n = c.rows, m = c.columns, d = c.features;
  const std::string name = std::string(type.name) + " " + std::to_string(n) + "x" + std::to_string(m) + "x" +
                           std::to_string(d) + " multiprocessors " + std::to_string(c.multiprocessors) +
                           (c.bias ? " bias" : "") + (c.ids ? " ids" : "");
  std::mt19937 rng(static_cast<unsigned>(n * 7919 + m * 31 + d));
  const double size = 0.7 / std::pow(static_cast<double>(d), 0.25);
  const Stored query(n * d, t, rng, size), key(m * d, t, rng, size), positive(n * d, t, rng, size);
  const Stored scale(n, wide, rng, 1.0), bias(m, wide, rng, 0.5), grad_pos(n, wide, rng, 1), grad_lse(n, wide, rng, 1);
  std::vector<int64_t> row_id(n), col_id(m);
  // A third of the columns have other ids; odd rows have an id whose low 32 bits alone are those of the others; the last
  // row loses everything but that third, and nothing is left for it where there is one column.
  for (size_t i = 0; i < n; ++i) row_id[i] = i % 2 == 0 ? static_cast<int64_t>(i % 5) : 9 + (int64_t{1} << 32);
  for (size_t j = 0; j < m; ++j) col_id[j] = j % 3 == 1 ? static_cast<int64_t>(j % 5) : 9;
  row_id[n - 1] = 9;

  // The truth.
  std::vector<double> pos(n), lse(n), mean(n * d), weight(n * m);
  std::vector<double> d_query(n * d), d_key(m * d), d_positive(n * d), d_scale(n), d_bias(m);
  std::vector<double> total(n), sum_key(n * d), sum_weight(n), pair_key(m * d), pair_bias(m);  // softplus sums
  const double factor = 1.25;
  for (size_t i = 0; i < n; ++i) {
    const double s = scale.value[i] * factor;
    double top = -INFINITY, sum = 0, dot_positive = 0;
    for (size_t f = 0; f < d; ++f) dot_positive += query.value[i * d + f] * positive.value[i * d + f];
    pos[i] = s * dot_positive;
    for (size_t j = 0; j < m; ++j) {
      double x = 0;
      for (size_t f = 0; f < d; ++f) x += query.value[i * d + f] * key.value[j * d + f];
      x = s * x + (c.bias ? bias.value[j] : 0);
      if (c.ids && row_id[i] == col_id[j]) x = -INFINITY;
      weight[i * m + j] = x;
      top = std::fmax(top, x);
    }
    for (size_t j = 0; j < m && top != -INFINITY; ++j) sum += std::exp(weight[i * m + j] - top);
    lse[i] = sum == 0 ? -INFINITY : top + std::log(sum);
    for (size_t j = 0; j < m; ++j) {
      double& w = weight[i * m + j];
      const double sigmoid = 1 / (1 + std::exp(-w));
      total[i] += w > 0 ? w + std::log1p(std::exp(-w)) : std::log1p(std::exp(w));
      sum_weight[i] += sigmoid;
      pair_bias[j] += sigmoid * grad_lse.value[i];
      for (size_t f = 0; f < d; ++f) {
        sum_key[i * d + f] += sigmoid * key.value[j * d + f];
        pair_key[j * d + f] += sigmoid * grad_lse.value[i] * s * query.value[i * d + f];
      }
      w = sum == 0 ? 0 : std::exp(w - lse[i]);
      d_bias[j] += w * grad_lse.value[i];
      for (size_t f = 0; f < d; ++f) {
        mean[i * d + f] += w * key.value[j * d + f];
        d_key[j * d + f] += w * grad_lse.value[i] * s * query.value[i * d + f];
      }
    }
    for (size_t f = 0; f < d; ++f) {
      const double sent =
          (sum == 0 ? 0 : grad_lse.value[i]) * mean[i * d + f] + grad_pos.value[i] * positive.value[i * d + f];
      d_query[i * d + f] = s * sent;
      d_positive[i * d + f] = s * grad_pos.value[i] * query.value[i * d + f];
      d_scale[i] += factor * query.value[i * d + f] * sent;
    }
  }

  const Buffer q(query.bytes), k(key.bytes), p(positive.bytes), s(scale.bytes), b(bias.bytes), gp(grad_pos.bytes),
      gl(grad_lse.bytes), ri(id_bytes(row_id)), ci(id_bytes(col_id));
  std::vector<std::vector<char>> first;
  for (int seed = 0; seed < schedules; ++seed) {
#ifdef FASTCL_EMULATED
    emu::seed = static_cast<uint64_t>(seed);
#endif
    Problem problem{};
    problem.rows = c.rows, problem.columns = c.columns, problem.features = c.features;
    problem.dtype = t, problem.tf32 = type.tf32, problem.multiprocessors = c.multiprocessors;
    problem.query = q.get(), problem.key = k.get(), problem.positive = p.get();
    problem.scale = s.get(), problem.factor = factor, problem.bias = c.bias ? b.get() : nullptr;
    problem.row_id = c.ids ? static_cast<int64_t*>(ri.get()) : nullptr;
    problem.col_id = c.ids ? static_cast<int64_t*>(ci.get()) : nullptr;
    const size_t w = width(wide), e = width(t);
    const Buffer o_pos(n * w), o_lse(n * w), o_only(n * w), o_mean(n * d * w), g_query(n * d * e), g_key(m * d * e),
        g_positive(n * d * e), g_scale(n * w), g_bias(m * w);
    const Outputs only{nullptr, o_only.get(), nullptr}, outputs{o_pos.get(), o_lse.get(), o_mean.get()};
    const Gradients gradients{gp.get(),         gl.get(),      o_lse.get(), o_mean.get(), g_query.get(),
                              g_positive.get(), g_scale.get(), g_key.get(), g_bias.get()};
    const Buffer w1(forward_workspace(problem, only)), w2(forward_workspace(problem, outputs)),
        w3(backward_workspace(problem, gradients));
    cudaError_t error = forward(problem, only, w1.get(), nullptr);
    if (error == cudaSuccess) error = forward(problem, outputs, w2.get(), nullptr);
    if (error == cudaSuccess) error = backward(problem, gradients, w3.get(), nullptr);
    problem.positive = nullptr;
    problem.reducer = Reducer::kSoftplusSum;
    const Buffer o_total(n * w), o_sum(n * d * w), o_weight(n * w), p_key(m * d * e), p_bias(m * w);
    const Outputs pairs{nullptr, o_total.get(), o_sum.get(), o_weight.get()};
    Gradients columns{};
    columns.grad_lse = gl.get(), columns.key = p_key.get(), columns.bias = p_bias.get();
    const Buffer w4(forward_workspace(problem, pairs)), w5(backward_workspace(problem, columns));
    if (error == cudaSuccess) error = forward(problem, pairs, w4.get(), nullptr);
    if (error == cudaSuccess) error = backward(problem, columns, w5.get(), nullptr);
    if (error != cudaSuccess) {
      check(false, name + ": " + cudaGetErrorString(error));
      return;
    }
    struct Result {
      const char* name;
      const Buffer& buffer;
      DType dtype;
      const std::vector<double>& truth;
    };
    const Result results[] = {{"pos", o_pos, wide, pos},
                              {"lse", o_lse, wide, lse},
                              {"lse alone", o_only, wide, lse},
                              {"mean_key", o_mean, wide, mean},
                              {"query", g_query, t, d_query},
                              {"key", g_key, t, d_key},
                              {"positive", g_positive, t, d_positive},
                              {"scale", g_scale, wide, d_scale},
                              {"bias", g_bias, wide, d_bias},
                              {"total", o_total, wide, total},
                              {"sum_key", o_sum, wide, sum_key},
                              {"sum_weight", o_weight, wide, sum_weight},
                              {"key of pairs", p_key, t, pair_key},
                              {"bias of pairs", p_bias, wide, pair_bias}};
    for (size_t r = 0; r < std::size(results); ++r) {
      const Result& result = results[r];
      const std::vector<char> bytes = result.buffer.read();
      if (seed == 0) {
        first.push_back(bytes);
        // What is not a gradient or its part is as good as float32, whatever the inputs.
        const bool exact = (r < 3 || r == 9 || r == 11) && !type.tf32;
        const double tolerance = t == DType::kFloat64                            ? 1e-12
                                 : exact || (t == DType::kFloat32 && !type.tf32) ? 2e-5
                                 : t == DType::kFloat16                          ? 2e-3
                                                                                 : 1.5e-2;
        double worst = 0, largest = 1;
        for (double v : result.truth) largest = std::isinf(v) ? largest : std::fmax(largest, std::fabs(v));
        for (size_t i = 0; i < result.truth.size(); ++i) {
          const double got = get(bytes, result.dtype, i), want = result.truth[i];
          const double off = got == want ? 0 : std::fabs(got - want);
          worst = off > worst || off != off ? off : worst;
        }
        char text[64];
        std::snprintf(text, sizeof text, ": off by %.3g", worst);
        check(worst <= tolerance * largest, name + " " + result.name + text);  // false for NaN
      } else {
        check(bytes == first[r], name + " " + result.name + ": differs between schedules, a race");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int schedules = argc > 1 ? std::atoi(argv[1]) : 4;
  const std::string types = argc > 2 ? argv[2] : "ftbhd";
  const std::string cases = argc > 3 ? argv[3] : "01234567";
  for (const char letter : types) {
    const Names type = letter == 'f'   ? Names{DType::kFloat32, false, "float32"}
                       : letter == 't' ? Names{DType::kFloat32, true, "tf32"}
                       : letter == 'b' ? Names{DType::kBFloat16, false, "bfloat16"}
                       : letter == 'h' ? Names{DType::kFloat16, false, "float16"}
                                       : Names{DType::kFloat64, false, "float64"};
    for (const char digit : cases) run(kCases[digit - '0'], type, schedules);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
