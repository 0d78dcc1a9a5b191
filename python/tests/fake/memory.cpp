#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <sstream>
#include <utility>

namespace fake {

namespace {

constexpr size_t kGranularity = 512;
constexpr size_t kArena = size_t{64} << 30;
// Not a number as a float, out of range as an index.
constexpr int kGarbage = 0xff;
constexpr size_t kRecent = 16;

void scribble(uintptr_t begin, size_t bytes) {
  std::memset(reinterpret_cast<void*>(begin), kGarbage, bytes);
}

Job scribbling(uintptr_t begin, size_t bytes) {
  return [begin, bytes] { scribble(begin, bytes); };
}

// Address space only: pages get memory when they are first touched.
Range reserve(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  for (; bytes >= (size_t{1} << 30); bytes /= 2) {
    void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (begin != MAP_FAILED) {
      const auto address = reinterpret_cast<uintptr_t>(begin);
      return {address, address + bytes};
    }
  }
  throw std::runtime_error("no address space for the fake accelerator");
}

bool passed(const std::vector<Moment>& moments) {
  return std::all_of(moments.begin(), moments.end(), [](const Moment& moment) {
    return moment.stream->reached(moment.position);
  });
}

std::string kib(size_t bytes) {
  return std::to_string(bytes / 1024) + " KiB";
}

}  // namespace

std::optional<uintptr_t> FreeRanges::take_at(uintptr_t begin, size_t bytes) {
  auto range = ends_.upper_bound(begin);
  if (range == ends_.begin()) {
    return std::nullopt;
  }
  --range;
  const auto [first, end] = *range;
  if (end < begin + bytes) {
    return std::nullopt;
  }
  ends_.erase(range);
  if (first < begin) {
    ends_.emplace(first, begin);
  }
  if (begin + bytes < end) {
    ends_.emplace(begin + bytes, end);
  }
  return begin;
}

std::optional<uintptr_t> FreeRanges::take(size_t bytes) {
  for (size_t at = recent_.size(); at-- > 0;) {
    if (auto found = take_at(recent_[at], bytes)) {
      recent_.erase(recent_.begin() + static_cast<std::ptrdiff_t>(at));
      return found;
    }
  }
  for (const auto& [begin, end] : ends_) {
    if (end - begin >= bytes) {
      return take_at(begin, bytes);
    }
  }
  return std::nullopt;
}

void FreeRanges::give(uintptr_t begin, size_t bytes) {
  recent_.push_back(begin);
  if (recent_.size() > kRecent) {
    recent_.erase(recent_.begin());
  }
  uintptr_t end = begin + bytes;
  auto next = ends_.lower_bound(begin);
  if (next != ends_.end() && next->first == end) {
    end = next->second;
    next = ends_.erase(next);
  }
  if (next != ends_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
    return;
  }
  ends_.emplace(begin, end);
}

uintptr_t Memory::Arena::take(size_t bytes) {
  if (range.end - next < bytes) {
    throw OutOfMemory("the address space of the fake accelerator is used up");
  }
  return std::exchange(next, next + bytes);
}

Memory& Memory::get() {
  static Memory* memory = new Memory();
  return *memory;
}

Memory::Memory() : world_(World::get()), pid_(getpid()) {
  for (int device = 0; device < kDevices; ++device) {
    devices_[device].range = reserve(kArena);
    devices_[device].next = devices_[device].range.begin;
    capacities_[device] = devices_[device].range.end - devices_[device].range.begin;
  }
  host_.range = reserve(kArena);
  host_.next = host_.range.begin;
  world_.describe_locked = &Memory::describe_locked;
}

const Memory::Block* Memory::find_locked(uintptr_t address) const {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) {
    return nullptr;
  }
  const Block& block = std::prev(next)->second;
  return address < block.begin + block.size ? &block : nullptr;
}

std::string Memory::describe_locked(Range range) {
  const Block* block = get().find_locked(range.begin);
  if (block == nullptr) {
    std::ostringstream text;
    text << std::hex << "bytes at 0x" << range.begin << "..0x" << range.end << " of no block";
    return text.str();
  }
  std::string text = "bytes " + std::to_string(range.begin - block->begin) + "..";
  text += std::to_string(range.end - block->begin) + " of ";
  text += block->owner ? "device block " : "pinned block ";
  return text + std::to_string(block->number);
}

Usage& Memory::usage_locked(const Block& block) {
  return block.owner ? usages_[block.owner->device] : pinned_;
}

void* Memory::add_locked(Block block) {
  block.number = ++numbers_;
  Usage& usage = usage_locked(block);
  usage.bytes += static_cast<int64_t>(block.size);
  usage.peak = std::max(usage.peak, usage.bytes);
  usage.requested += static_cast<int64_t>(block.requested);
  ++usage.blocks;
  ++usage.allocations;
  const Access access{block.range(), true};
  const std::string what = "allocation of " + std::to_string(block.requested) + " bytes";
  Stream* owner = block.owner;
  const auto begin = block.begin;
  const auto size = block.size;
  blocks_[begin] = std::move(block);
  if (owner) {
    world_.launch_locked(*owner, what, {access}, scribbling(begin, size), Role::Allocate);
  } else {
    world_.host_locked("pinned " + what, access, Role::Allocate);
  }
  return reinterpret_cast<void*>(begin);
}

void* Memory::allocate(Stream& stream, size_t bytes) {
  try {
    world_.point("alloc");
  } catch (const Failure& failure) {
    throw OutOfMemory(failure.what());
  }
  const size_t size = std::max((bytes + kGranularity - 1) / kGranularity, size_t{1}) * kGranularity;
  make_room(stream.device, size);
  const std::lock_guard<std::mutex> lock(world_.mutex);
  active_[stream.device] += size;
  const auto freed = free_[&stream].take(size);
  const uintptr_t begin = freed ? *freed : devices_[stream.device].take(size);
  return add_locked({begin, size, bytes, &stream, 0});
}

void Memory::make_room(int device, size_t bytes) {
  std::vector<Moment> behind;
  {
    const std::lock_guard<std::mutex> lock(world_.mutex);
    reclaim_locked();
    if (active_[device] + bytes <= capacities_[device]) {
      return;
    }
    for (const Pending& pending : pending_) {
      behind.insert(behind.end(), pending.behind.begin(), pending.behind.end());
    }
  }
  for (const Moment& moment : behind) {
    moment.stream->wait(moment.position);
  }
  const std::lock_guard<std::mutex> lock(world_.mutex);
  reclaim_locked();
  if (active_[device] + bytes > capacities_[device]) {
    ++usages_[device].failures;
    throw OutOfMemory(
        "fake out of memory: tried to allocate " + kib(bytes) + ", " + kib(active_[device]) + " of " +
        kib(capacities_[device]) + " are in use");
  }
}

void* Memory::pin(size_t bytes) {
  world_.point("pin");
  const size_t size = std::bit_ceil(std::max(bytes, kGranularity));
  const std::lock_guard<std::mutex> lock(world_.mutex);
  reclaim_locked();
  auto& freed = free_pinned_[size];
  uintptr_t begin = 0;
  if (freed.empty()) {
    begin = host_.take(size);
  } else {
    begin = freed.back();
    freed.pop_back();
  }
  return add_locked({begin, size, bytes, nullptr, 0});
}

void Memory::free(void* address) {
  // The threads of the streams do not exist in a forked child, which has nothing to give back.
  if (getpid() != pid_) {
    return;
  }
  const std::lock_guard<std::mutex> lock(world_.mutex);
  const auto at = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (at == blocks_.end()) {
    return;
  }
  const Block block = at->second;
  Usage& usage = usage_locked(block);
  usage.bytes -= static_cast<int64_t>(block.size);
  usage.requested -= static_cast<int64_t>(block.requested);
  --usage.blocks;
  std::vector<Moment> behind;
  for (Stream* user : block.users) {
    behind.push_back(world_.record_locked(*user));
  }
  const std::string what = "free of " + std::to_string(block.requested) + " bytes";
  if (block.owner) {
    world_.launch_locked(*block.owner, what, {{block.range(), true}}, nullptr, Role::Free, behind);
  } else {
    world_.host_locked("pinned " + what, {block.range(), true}, Role::Free, behind);
  }
  blocks_.erase(at);
  if (behind.empty()) {
    recycle_locked(block);
  } else {
    pending_.push_back({block, std::move(behind)});
  }
}

void Memory::recycle_locked(const Block& block) {
  if (block.owner) {
    block.owner->push(scribbling(block.begin, block.size));
    active_[block.owner->device] -= block.size;
    free_[block.owner].give(block.begin, block.size);
  } else {
    scribble(block.begin, block.size);
    free_pinned_[block.size].push_back(block.begin);
  }
}

void Memory::reclaim_locked() {
  std::vector<Pending> waiting;
  for (Pending& pending : pending_) {
    if (passed(pending.behind)) {
      recycle_locked(pending.block);
    } else {
      waiting.push_back(std::move(pending));
    }
  }
  pending_ = std::move(waiting);
}

bool Memory::record(const void* address, Stream& stream) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  const Block* found = find_locked(reinterpret_cast<uintptr_t>(address));
  if (found == nullptr) {
    return false;
  }
  if (found->owner != &stream && (found->owner || host_events_)) {
    blocks_[found->begin].users.insert(&stream);
  }
  return true;
}

bool Memory::is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  const Block* block = find_locked(reinterpret_cast<uintptr_t>(address));
  return block != nullptr && block->owner == nullptr;
}

std::optional<int> Memory::device_of(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (int device = 0; device < kDevices; ++device) {
    if (devices_[device].range.begin <= at && at < devices_[device].range.end) {
      return device;
    }
  }
  return std::nullopt;
}

void Memory::set_capacity(int device, size_t bytes) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  const size_t most = devices_[device].range.end - devices_[device].range.begin;
  capacities_[device] = bytes == 0 ? most : std::min(bytes, most);
}

void Memory::set_host_events(bool on) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  host_events_ = on;
}

size_t Memory::capacity(int device) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  return capacities_[device];
}

Usage Memory::usage(int device) {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  return usages_[device];
}

Usage Memory::pinned() {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  return pinned_;
}

void Memory::reset_peaks() {
  const std::lock_guard<std::mutex> lock(world_.mutex);
  for (Usage& usage : usages_) {
    usage.peak = usage.bytes;
  }
  pinned_.peak = pinned_.bytes;
}

}  // namespace fake
