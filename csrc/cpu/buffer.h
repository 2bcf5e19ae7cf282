// Temporary memory of a call, kept by each thread for its next call. A loss is called thousands of times with the same
// sizes, and malloc would return blocks of these sizes to the system in between; getting fresh pages costs more than
// the arithmetic done on them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <utility>
#include <vector>

namespace fastcl {

// Names the size that was asked for. The message has a buffer of its own: there may be no memory left to allocate one.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) {
    std::snprintf(text_, sizeof text_, "fastcl: out of memory: no %zu bytes for temporary data", bytes);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[96];
};

// The free blocks of one thread: at most kKeptBlocks of them and kKeptBytes in all. Other blocks go back to the system.
class BlockCache {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  static BlockCache& of_this_thread() {
    static thread_local BlockCache cache;
    return cache;
  }

  Block take(size_t bytes) {
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i].bytes >= bytes && (best == free_.size() || free_[i].bytes < free_[best].bytes)) best = i;
    }
    if (best < free_.size()) {
      std::swap(free_[best], free_.back());
      const Block block = free_.back();
      free_.pop_back();
      kept_ -= block.bytes;
      return block;
    }
    void* data = ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow);
    if (data == nullptr) throw OutOfMemory(bytes);
    return {data, bytes};
  }

  void give(Block block) {
    if (kept_ + block.bytes > kKeptBytes || free_.size() == kKeptBlocks) {
      release(block);
      return;
    }
    kept_ += block.bytes;
    free_.push_back(block);
  }

  ~BlockCache() {
    for (const Block& block : free_) release(block);
  }

  static constexpr size_t kAlignment = 64;

 private:
  // Not std::aligned_alloc and std::free: Windows has no aligned_alloc.
  static void release(const Block& block) { ::operator delete(block.data, std::align_val_t{kAlignment}); }

  static constexpr size_t kKeptBytes = size_t{32} << 20;
  static constexpr size_t kKeptBlocks = 16;
  BlockCache() { free_.reserve(kKeptBlocks); }
  std::vector<Block> free_;
  size_t kept_ = 0;
};

// `count` uninitialised elements, aligned to a cache line (64 bytes), freed at the end of the scope.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    // Whole cache lines, and one to spare for a vector load that starts at the last element.
    const size_t lines = static_cast<size_t>(count) * sizeof(T) / BlockCache::kAlignment + 2;
    block_ = BlockCache::of_this_thread().take(lines * BlockCache::kAlignment);
  }
  Buffer(Buffer&& other) noexcept : block_(std::exchange(other.block_, {nullptr, 0})) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (block_.data != nullptr) BlockCache::of_this_thread().give(block_);
  }
  T* get() const { return static_cast<T*>(block_.data); }
  T& operator[](int64_t i) const { return get()[i]; }

 private:
  BlockCache::Block block_;
};

}  // namespace fastcl
