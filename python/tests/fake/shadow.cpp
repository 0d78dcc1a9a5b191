#include "shadow.h"

namespace fake {

namespace {

std::shared_ptr<const Mark> mark_of(const Op& op, bool writes) {
  return std::make_shared<const Mark>(Mark{op.actor, op.clock.of(op.actor), op.call, op.role, writes});
}

// The history of one cell in front of an operation. A free that is ordered in front of it is a finding
// only when nothing was allocated there since.
void compare(const std::shared_ptr<const Mark>& mark, Range range, const Op& op, std::vector<Conflict>& found) {
  if (!mark->before(op)) {
    found.push_back({*mark, range, false});
  } else if (mark->role == Role::Free && op.role != Role::Allocate) {
    found.push_back({*mark, range, true});
  }
}

}  // namespace

std::vector<Conflict> Shadow::access(const Access& access, const Op& op) {
  std::vector<Conflict> found;
  if (access.range.empty()) {
    return found;
  }
  cut(access.range);
  if (access.writes) {
    write(access.range, op, found);
  } else {
    read(access.range, op, found);
  }
  return found;
}

void Shadow::read(Range range, const Op& op, std::vector<Conflict>& found) {
  const auto mark = mark_of(op, false);
  for (auto at = cells_.lower_bound(range.begin); at != cells_.end() && at->first < range.end; ++at) {
    Cell& cell = at->second;
    if (cell.write) {
      compare(cell.write, {at->first, cell.end}, op, found);
    }
    // What the actor read earlier is in front of this read.
    std::erase_if(cell.reads, [&](const auto& read) { return read->actor == op.actor; });
    cell.reads.push_back(mark);
  }
}

void Shadow::write(Range range, const Op& op, std::vector<Conflict>& found) {
  const auto begin = cells_.lower_bound(range.begin);
  const auto end = cells_.lower_bound(range.end);
  for (auto at = begin; at != end; ++at) {
    const Range part{at->first, at->second.end};
    if (at->second.write) {
      compare(at->second.write, part, op, found);
    }
    for (const auto& read : at->second.reads) {
      compare(read, part, op, found);
    }
  }
  cells_.erase(begin, end);
  cells_.emplace(range.begin, Cell{range.end, mark_of(op, true), {}});
}

void Shadow::cut(Range range) {
  split(range.begin);
  split(range.end);
  std::vector<Range> holes;
  uintptr_t at = range.begin;
  for (auto cell = cells_.lower_bound(range.begin); cell != cells_.end() && cell->first < range.end; ++cell) {
    if (at < cell->first) {
      holes.push_back({at, cell->first});
    }
    at = cell->second.end;
  }
  if (at < range.end) {
    holes.push_back({at, range.end});
  }
  for (const Range& hole : holes) {
    cells_.emplace(hole.begin, Cell{hole.end, nullptr, {}});
  }
}

void Shadow::split(uintptr_t at) {
  auto cell = cells_.lower_bound(at);
  if (cell == cells_.begin()) {
    return;
  }
  --cell;
  if (cell->first < at && at < cell->second.end) {
    Cell rest = cell->second;
    cell->second.end = at;
    cells_.emplace(at, std::move(rest));
  }
}

}  // namespace fake
