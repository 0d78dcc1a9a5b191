// Memory of the devices and pinned memory of the host.
//
// Both allocators hand out parts of address ranges that stay mapped until the process ends, so a copy
// that comes too late reads or writes garbage instead of crashing.
//
// Device memory belongs to the stream that was current at its allocation. Freeing is an operation on
// that stream: the bytes are scribbled over when the stream gets there, and the block may be handed out
// again at once for later work of the same stream. A block that was recorded on other streams is put
// aside until they have passed the point at which it was freed.
//
// Pinned memory belongs to the host. It is rounded up to a power of two, as PyTorch's caching host
// allocator does, and may be handed out again at once, except while streams that were recorded on the
// block have not passed the point at which it was freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "world.h"

namespace fake {

// No room on a device.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Usage {
  int64_t bytes = 0;
  int64_t peak = 0;
  int64_t requested = 0;
  int64_t blocks = 0;
  int64_t allocations = 0;
  int64_t failures = 0;
};

// Free addresses: what was freed last is handed out first.
class FreeRanges {
 public:
  std::optional<uintptr_t> take(size_t bytes);
  void give(uintptr_t begin, size_t bytes);

 private:
  std::optional<uintptr_t> take_at(uintptr_t begin, size_t bytes);

  // Neighbours are merged.
  std::map<uintptr_t, uintptr_t> ends_;
  std::vector<uintptr_t> recent_;
};

class Memory {
 public:
  static Memory& get();

  // Device memory, on a stream.
  void* allocate(Stream& stream, size_t bytes);
  void* pin(size_t bytes);
  // Frees what either of them gave.
  void free(void* address);
  // The block must outlive what is queued on the stream now, when it is freed. False if it is no block.
  bool record(const void* address, Stream& stream);

  bool is_pinned(const void* address);
  // The device that an address belongs to.
  std::optional<int> device_of(const void* address);

  void set_capacity(int device, size_t bytes);
  // Whether pinned blocks wait for the streams recorded on them before they are used again.
  void set_host_events(bool on);
  size_t capacity(int device);
  Usage usage(int device);
  Usage pinned();
  void reset_peaks();

 private:
  struct Block {
    uintptr_t begin = 0;
    size_t size = 0;
    size_t requested = 0;
    // None for pinned memory.
    Stream* owner = nullptr;
    uint64_t number = 0;
    std::set<Stream*> users = {};

    Range range() const {
      return {begin, begin + size};
    }
  };
  struct Pending {
    Block block;
    std::vector<Moment> behind;
  };
  // Addresses that were never handed out yet.
  struct Arena {
    Range range;
    uintptr_t next = 0;
    uintptr_t take(size_t bytes);
  };

  Memory();

  static std::string describe_locked(Range range);
  Usage& usage_locked(const Block& block);
  const Block* find_locked(uintptr_t address) const;
  void* add_locked(Block block);
  void recycle_locked(const Block& block);
  void reclaim_locked();
  void make_room(int device, size_t bytes);

  World& world_;
  const int pid_;
  Arena devices_[kDevices];
  Arena host_;
  size_t capacities_[kDevices];
  Usage usages_[kDevices];
  // Bytes that no new block may use yet: live ones and those put aside.
  size_t active_[kDevices] = {};
  Usage pinned_;
  bool host_events_ = true;
  uint64_t numbers_ = 0;
  std::map<uintptr_t, Block> blocks_;
  std::vector<Pending> pending_;
  std::map<Stream*, FreeRanges> free_;
  std::map<size_t, std::vector<uintptr_t>> free_pinned_;
};

}  // namespace fake
