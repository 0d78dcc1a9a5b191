// Who touched which bytes last: the memory of the checker.
//
// Device memory and pinned memory are parts of one address space, that of the process, so one map holds
// the history of both. It outlives allocations: an access of freed memory still conflicts with what
// happens at the same address afterwards. Callers hold the lock of the world.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

namespace fake {

// What an access does to the memory.
enum class Role { Use, Allocate, Free };

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool empty() const {
    return begin >= end;
  }
};

struct Access {
  Range range;
  bool writes = false;
};

// A call, as a report names it.
struct Call {
  uint64_t number = 0;
  std::string what;
};

// An operation and all that is ordered in front of it, itself included.
struct Op {
  size_t actor = kHost;
  Clock clock;
  std::shared_ptr<const Call> call;
  Role role = Role::Use;
};

// What is remembered of an operation.
struct Mark {
  size_t actor = kHost;
  uint64_t time = 0;
  std::shared_ptr<const Call> call;
  Role role = Role::Use;
  bool writes = false;

  bool before(const Op& op) const {
    return op.clock.of(actor) >= time;
  }
};

// Two operations that do not go together, and the bytes that both touch.
struct Conflict {
  Mark with;
  Range range;
  // The bytes were given back, in order, and not allocated since.
  bool after_free = false;
};

class Shadow {
 public:
  // A read conflicts with writes, a write with everything.
  std::vector<Conflict> access(const Access& access, const Op& op);

 private:
  struct Cell {
    uintptr_t end = 0;
    std::shared_ptr<const Mark> write;
    std::vector<std::shared_ptr<const Mark>> reads;
  };

  void read(Range range, const Op& op, std::vector<Conflict>& found);
  void write(Range range, const Op& op, std::vector<Conflict>& found);
  // Makes cells begin and end with the range, and cover it.
  void cut(Range range);
  void split(uintptr_t at);

  std::map<uintptr_t, Cell> cells_;
};

}  // namespace fake
