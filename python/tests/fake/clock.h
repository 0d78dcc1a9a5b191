// Vector clocks: who has seen how much of whom.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

// The host's number among the actors. All host threads are one actor: what one thread hands to another
// (a lock, a condition variable, the interpreter lock) is invisible here, and calls reach the device one
// after the other anyway.
constexpr size_t kHost = 0;

class Clock {
 public:
  // How many steps of an actor are known to be in front.
  uint64_t of(size_t actor) const {
    return actor < steps_.size() ? steps_[actor] : 0;
  }

  // One more step of an actor.
  void tick(size_t actor) {
    if (steps_.size() <= actor) {
      steps_.resize(actor + 1, 0);
    }
    ++steps_[actor];
  }

  // Learns all that the other one knows.
  void join(const Clock& other) {
    if (steps_.size() < other.steps_.size()) {
      steps_.resize(other.steps_.size(), 0);
    }
    for (size_t actor = 0; actor < other.steps_.size(); ++actor) {
      steps_[actor] = std::max(steps_[actor], other.steps_[actor]);
    }
  }

 private:
  std::vector<uint64_t> steps_;
};

}  // namespace fake
