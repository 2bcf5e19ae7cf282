// The CPU kernels on random problems without torch, to be built with sanitizers: every instruction set, both element types, every
// storage type, extreme values, several threads on one problem. Results are compared with a plain double-precision loop.
//
//   kernels SECONDS SEED        runs until the time is over; prints what it tried; exit code 1 at the first wrong result
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "contrast.h"
#include "cpu/drive.h"
#include "cpu/isa.h"

using namespace fastcl;

namespace {

std::mt19937_64 rng;
int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }
double normal() { return std::normal_distribution<double>()(rng); }

// An exact-sized heap block, so that one element too far is seen.
template <class T>
std::vector<T> exact(size_t n, T value = T(0)) {
  std::vector<T> v(n, value);
  v.shrink_to_fit();
  return v;
}

// A matrix in a storage type, and what its elements are worth.
struct Stored {
  std::vector<char> bytes;
  std::vector<double> value;
  DType dtype;
  Matrix view() const { return {bytes.data(), dtype}; }
};

size_t width(DType d) { return d == DType::kFloat64 ? 8 : d == DType::kFloat32 ? 4 : 2; }

Stored store(const std::vector<double>& x, DType dtype) {
  Stored s{exact<char>(x.size() * width(dtype)), x, dtype};
  for (size_t i = 0; i < x.size(); ++i) {
    const float f = static_cast<float>(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if (dtype == DType::kFloat64) {
      std::memcpy(&s.bytes[8 * i], &x[i], 8);
    } else if (dtype == DType::kFloat32) {
      std::memcpy(&s.bytes[4 * i], &f, 4);
      s.value[i] = f;
    } else {
      // Truncation is a fine value of either 16-bit type; float16 is limited to its normal range.
      uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (dtype == DType::kFloat16) {
        const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
        half = exponent <= 0
                   ? 0
                   : static_cast<uint16_t>(((bits >> 16) & 0x8000) | (exponent << 10) | ((bits >> 13) & 1023));
        if (exponent >= 31) half = static_cast<uint16_t>(0x7bff | ((bits >> 16) & 0x8000));
        const int e = (half >> 10) & 31;
        s.value[i] = e == 0 ? 0 : std::ldexp(1024 + (half & 1023), e - 25) * ((half & 0x8000) ? -1 : 1);
      } else {
        const uint32_t wide = static_cast<uint32_t>(half) << 16;
        float back;
        std::memcpy(&back, &wide, 4);
        s.value[i] = back;
      }
      std::memcpy(&s.bytes[2 * i], &half, 2);
    }
  }
  return s;
}

bool close(double ours, double truth, double tolerance) {
  if (std::isnan(truth) || std::isinf(truth)) return std::isnan(truth) ? std::isnan(ours) : ours == truth;
  return std::fabs(ours - truth) <= tolerance * (1 + std::fabs(truth));
}

// Threads of its own for every region, so that the thread sanitizer sees them start and end.
struct InThreads {
  int64_t count;
  template <class F>
  void operator()(int64_t begin, int64_t end, int64_t, const F& f) const {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = begin + (end - begin) * i / count, to = begin + (end - begin) * (i + 1) / count;
      if (from < to) threads.emplace_back([&f, from, to] { f(from, to); });
    }
    for (std::thread& t : threads) t.join();
  }
};

// One problem: forward and backward of one reducer against plain loops. Returns the first wrong result's name, or null.
template <class T>
const char* problem(const Isa& isa, bool pairs) {
  const int64_t n = 1 + below(70), m = below(8) == 0 ? below(3) : 1 + below(600),
                d = 1 + below(below(4) == 0 ? 300 : 40);
  const DType types[] = {DType::kFloat32, sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32, DType::kBFloat16,
                         DType::kFloat16};
  const double size = std::pow(10.0, static_cast<double>(below(4)) - 2) / std::sqrt(static_cast<double>(d));
  const bool ids = below(2), bias = below(2), out = below(3) != 0;
  std::vector<double> q(n * d), key(m * d);
  for (double& x : q) x = normal();
  for (double& x : key) x = normal() * size;
  const Stored qs = store(q, types[below(4)]), ks = store(key, types[below(4)]);
  const Kernels<T>& k = kernels_of<T>(isa, qs.dtype, ks.dtype);
  const int64_t padded_m = (m + k.panel_width - 1) / k.panel_width * k.panel_width;
  const T log2e = T(1.442695040888963), infinity = std::numeric_limits<T>::infinity();
  auto factor = exact<T>(n, log2e);
  auto shift = exact<T>(padded_m, -infinity);
  std::vector<double> b(m, 0.0);
  auto row_id = exact<int64_t>(n), col_id = exact<int64_t>(m);
  auto tag = exact<Tag<T>>(padded_m);
  for (int64_t& x : row_id) x = below(5) - (int64_t{1} << 40);
  for (int64_t& x : col_id) x = below(5) - (int64_t{1} << 40);
  for (int64_t j = 0; j < m; ++j) {
    b[j] = !bias ? 0 : below(6) == 0 ? -std::numeric_limits<double>::infinity() : static_cast<double>(T(normal()));
    shift[j] = static_cast<T>(static_cast<T>(b[j]) * log2e);
    tag[j] = tag_of<T>(col_id[j]);
  }
  Pass<T> pass{};
  pass.rows = n;
  pass.features = d;
  pass.row_data = qs.view();
  pass.row_factor = factor.data();
  pass.row_id = ids ? row_id.data() : nullptr;
  pass.columns.count = m;
  pass.columns.shift = bias ? shift.data() : nullptr;
  pass.columns.data = ks.view();
  pass.columns.id = ids ? col_id.data() : nullptr;
  pass.columns.tag = ids ? tag.data() : nullptr;
  auto reduced = exact<T>(n), result = exact<T>(n * d), extra = exact<T>(n), ones = exact<T>(m, T(1));
  pass.reduced = reduced.data();
  const DType compute = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
  pass.out = {out ? result.data() : nullptr, compute};
  if (pairs && out) {
    pass.columns.extra = ones.data();
    pass.out_extra = extra.data();
  }
  const InThreads parallel{1 + below(3)};
  const Driver driver(k, parallel.count, parallel);
  auto sums = exact<T>(m * d), extra_sums = exact<T>(m);
  const bool columns = below(2) && driver.can_keep(pass);
  const auto reduction = pairs ? &Kernels<T>::softplus_sum : &Kernels<T>::log_sum_exp;
  if (columns) {
    const auto factors = [](int64_t begin, int64_t end, T* factor, T* extra) {
      for (int64_t i = begin; i < end; ++i) {
        factor[i - begin] = T(1 + i % 3);
        extra[i - begin] = T(i % 2);
      }
    };
    driver.run_with_columns(pass, reduction, factors, qs.view(), sums.data(), extra_sums.data());
  } else {
    driver.run(pass, reduction);
  }

  const double tolerance = (sizeof(T) == 4 ? 3e-5 : 1e-11) * (1 + 100 * size);
  std::vector<double> true_sums(m * d, 0.0), true_extra(m, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    std::vector<double> x(m), weight(m);
    double highest = -std::numeric_limits<double>::infinity(), sum = 0, weights = 0;
    for (int64_t j = 0; j < m; ++j) {
      x[j] = b[j];
      for (int64_t f = 0; f < d; ++f) x[j] += qs.value[i * d + f] * ks.value[j * d + f];
      if (ids && row_id[i] == col_id[j]) x[j] = -std::numeric_limits<double>::infinity();
      highest = std::fmax(highest, x[j]);
    }
    for (int64_t j = 0; j < m; ++j) {
      weight[j] = pairs                                    ? 1 / (1 + std::exp(-x[j]))
                  : x[j] == highest && std::isinf(highest) ? 0
                                                           : std::exp(x[j] - highest);
      sum += pairs ? std::fmax(x[j], 0) + std::log1p(std::exp(-std::fabs(x[j]))) : weight[j];
      weights += weight[j];
    }
    if (!close(reduced[i], pairs ? sum : highest + std::log(sum), tolerance * (pairs ? 10 : 1))) return "reduced";
    const double whole = pairs ? 1 : sum;
    for (int64_t j = 0; columns && whole != 0 && j < m; ++j) {
      true_extra[j] += static_cast<double>(i % 2) * weight[j] / whole;
      for (int64_t f = 0; f < d; ++f) {
        true_sums[j * d + f] += static_cast<double>(1 + i % 3) * weight[j] / whole * qs.value[i * d + f];
      }
    }
    if (!out) continue;
    if (pairs && !close(extra[i], weights, tolerance * 10)) return "sum of weights";
    for (int64_t f = 0; f < d; ++f) {
      double truth = 0;
      for (int64_t j = 0; j < m; ++j) truth += weight[j] * ks.value[j * d + f];
      if (!pairs) truth = sum == 0 ? 0 : truth / sum;
      if (!close(result[i * d + f], truth, tolerance * (1 + 10 * size))) return "out";
    }
  }

  for (int64_t j = 0; columns && j < m; ++j) {
    if (!close(extra_sums[j], true_extra[j], tolerance * 10)) return "sum over rows";
    for (int64_t f = 0; f < d; ++f) {
      if (!close(sums[j * d + f], true_sums[j * d + f], tolerance * 30)) return "column sums";
    }
  }

  // Backward kernels and row kernels: for the sanitizers' eyes; their values are tested through torch.
  auto narrow = exact<char>(n * d * width(qs.dtype));
  pass.out = {narrow.data(), qs.dtype};
  pass.row_shift = reduced.data();
  pass.columns.value_factor = ones.data();
  pass.columns.extra = ones.data();
  pass.out_extra = extra.data();
  if (n > 0 && !pairs) {
    for (T& x : reduced) x = -(std::isfinite(x) ? x : T(0)) * log2e;
  }
  driver.run(pass, pairs ? &Kernels<T>::sigmoid : &Kernels<T>::known_sum);
  k.row_dot(qs.view(), qs.view(), d, 0, n, extra.data());
  k.row_combine(factor.data(), qs.view(), factor.data(), qs.view(), d, 0, n, {narrow.data(), qs.dtype});
  return nullptr;
}

// Both directions of one matrix, on vectors that end where they end.
template <class T>
const char* both_ways(const Isa& isa) {
  const Kernels<T>& k = kernels_of<T>(isa, DType::kFloat32, DType::kFloat32);
  const int64_t n = 1 + below(below(3) == 0 ? 300 : 40);
  const double scale = 0.5 + normal() * normal(), log2e = 1.4426950408889634;
  auto x = exact<T>(n * n), out = exact<T>(n * n), pos = exact<T>(n), diagonal = exact<T>(n);
  std::vector<std::vector<T>> v;  // tops, sums and factors of the rows, then those of the columns
  for (int i = 0; i < 6; ++i) v.push_back(exact<T>(n));
  auto id = exact<int64_t>(n);
  for (T& value : x) value = static_cast<T>(4 * normal());
  for (int64_t& value : id) value = below(below(2) ? 3 : 1000);
  const std::vector<T> product(x.begin(), x.end());
  const int64_t* ids = below(2) ? id.data() : nullptr;
  const auto met = [&](int64_t i, int64_t j) { return ids == nullptr ? i == j : id[i] == id[j]; };
  const int64_t half = below(n + 1);
  for (const auto& [begin, end] : {std::pair(int64_t{0}, half), std::pair(half, n)}) {
    k.both_rows(x.data(), n, T(scale), T(scale * log2e), ids, begin, end, pos.data(), v[0].data(), v[1].data());
  }
  k.both_columns(x.data(), n, 0, half, v[3].data(), v[4].data());
  k.both_columns(x.data(), n, half, n, v[3].data(), v[4].data());
  for (int64_t i = 0; i < n; ++i) {
    diagonal[i] = T(i);
    for (int side = 0; side < 2; ++side) v[3 * side + 2][i] = v[3 * side + 1][i] == 0 ? T(0) : 1 / v[3 * side + 1][i];
  }
  k.both_weights(x.data(), n, ids, 0, n, v[0].data(), v[2].data(), v[3].data(), v[5].data(), diagonal.data(),
                 out.data());
  const double tolerance = (sizeof(T) == 4 ? 2e-5 : 1e-12) * (1 + 20 * std::fabs(scale));
  std::vector<double> sums[2] = {std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
  const auto weight = [&](int64_t i, int64_t j) {
    return met(i, j) ? 0.0 : std::exp(static_cast<double>(product[i * n + j]) * scale);
  };
  for (int64_t i = 0; i < n; ++i) {
    if (!close(pos[i], static_cast<double>(product[i * n + i]) * scale, tolerance)) return "pos of both ways";
    for (int64_t j = 0; j < n; ++j) {
      sums[0][i] += weight(i, j);
      sums[1][j] += weight(i, j);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int side = 0; side < 2; ++side) {
      const double found =
          (static_cast<double>(v[3 * side][i]) + std::log2(static_cast<double>(v[3 * side + 1][i]))) / log2e;
      const bool empty = sums[side][i] == 0 && v[3 * side + 1][i] == 0;
      if (!empty && !close(found, std::log(sums[side][i]), tolerance)) return "lse of both ways";
    }
    for (int64_t j = 0; j < n; ++j) {
      const double w = weight(i, j);
      const double truth = i == j ? double(i) : w == 0 ? 0 : w / sums[0][i] + w / sums[1][j];
      if (!close(out[i * n + j], truth, tolerance)) return "weights of both ways";
    }
  }
  return nullptr;
}

// The best row for each column, and sums of rows: on packed panels, and on vectors that end where they end.
template <class T>
const char* best(const Isa& isa) {
  const DType narrow[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const auto any_type = [&] { return sizeof(T) == 8 ? DType::kFloat64 : narrow[below(3)]; };
  const int64_t n = 1 + below(90), m = 1 + below(90), d = 1 + below(below(3) == 0 ? 300 : 40);
  const auto drawn = [&](int64_t rows) {
    std::vector<double> x(rows * d);
    for (double& value : x) value = normal();
    return store(x, any_type());
  };
  const Stored xs = drawn(n), ys = drawn(m);
  const Kernels<T>& k = kernels_of<T>(isa, xs.dtype, ys.dtype);
  const int64_t panels = (m + k.panel_width - 1) / k.panel_width, begin = below(n + 1);
  std::atomic<bool> wild{false};
  Pass<T> pass{};
  pass.features = d;
  pass.row_data = xs.view();
  pass.wild = &wild;
  pass.columns.count = m;
  pass.columns.data = ys.view();
  auto packed = exact<T>(panels * k.panel_elements(d)), scratch = exact<T>(k.best_scratch_elements(n - begin, d));
  auto top = exact<T>(panels * k.panel_width);
  auto at = exact<Tag<T>>(panels * k.panel_width);
  k.pack_panels(pass, 0, panels, packed.data());
  pass.columns.panels = packed.data();
  Part<T> part{};
  part.row_begin = begin;
  part.row_end = n;
  part.panel_end = panels;
  k.best_rows(pass, part, scratch.data(), top.data(), at.data());
  if (wild) return "range of best rows";
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  for (int64_t j = 0; j < m; ++j) {
    const auto dot = [&](int64_t i) {
      double sum = 0;
      for (int64_t f = 0; f < d; ++f) sum += xs.value[i * d + f] * ys.value[j * d + f];
      return sum;
    };
    double truth = -std::numeric_limits<double>::infinity();
    for (int64_t i = begin; i < n; ++i) truth = std::max(truth, dot(i));
    if (begin == n) {
      if (at[j] != -1 || top[j] != -std::numeric_limits<T>::infinity()) return "best of no rows";
    } else if (!close(top[j], truth, tolerance * d) || !close(dot(begin + at[j]), truth, tolerance * d)) {
      return "best row";
    }
  }

  const int64_t count = below(60);
  auto row = exact<int64_t>(count);
  auto weight = exact<T>(count);
  std::vector<double> truth(d, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    row[i] = below(n);
    weight[i] = static_cast<T>(normal());
    for (int64_t f = 0; f < d; ++f) truth[f] += static_cast<double>(weight[i]) * xs.value[row[i] * d + f];
  }
  auto out = exact<T>(2 * d);
  k.sum_rows(xs.view(), d, row.data(), weight.data(), count, 1,
             {out.data(), sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32});
  for (int64_t f = 0; f < d; ++f) {
    if (!close(out[d + f], truth[f], tolerance * (1 + count))) return "sum of rows";
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  rng.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t tried = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (const Isa* isa : usable_isas()) {
      const bool pairs = below(2);
      const char* wrong[] = {problem<float>(*isa, pairs), problem<double>(*isa, pairs),
                             both_ways<float>(*isa),      both_ways<double>(*isa),
                             best<float>(*isa),           best<double>(*isa)};
      tried += 6;
      for (const char* what : wrong) {
        if (what == nullptr) continue;
        std::printf("wrong %s on %s after %lld problems\n", what, isa->name, static_cast<long long>(tried));
        return 1;
      }
    }
  }
  std::printf("%lld problems\n", static_cast<long long>(tried));
  return 0;
}
