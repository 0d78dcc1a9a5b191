// A stream: a queue of jobs and the thread that runs them, in order.
//
// `push`, `wait`, `reached` and `take_error` may be called by any thread. A job runs on the stream's own
// thread and holds no tensor of the device: it knows addresses only, so that memory which the program
// drops too early is really gone. `clock` belongs to the lock of the world.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "clock.h"

namespace fake {

using Job = std::function<void()>;

// How late streams are. The delay of a job is drawn from the seed, the stream and the job's place in it.
struct Lateness {
  std::atomic<uint64_t> seed{0};
  std::atomic<uint64_t> max_us{50};
};

class Stream {
 public:
  Stream(int device, int64_t index, size_t actor, const Lateness& lateness)
      : device(device), index(index), actor(actor), lateness_(lateness) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::string name() const;

  // Queues a job; its position is the number of jobs that were queued up to and including it.
  uint64_t push(Job job);
  uint64_t pushed();
  // Whether all jobs up to a position have run.
  bool reached(uint64_t position);
  void wait(uint64_t position);
  // The first error of a job since the last call.
  std::optional<std::string> take_error();

  // Called within a job: lets some time pass between reading and writing.
  static void pause();

  const int device;
  const int64_t index;
  const size_t actor;
  Clock clock;

 private:
  void work();
  void sleep(uint64_t position, uint64_t salt) const;

  const Lateness& lateness_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_;
  std::deque<Job> jobs_;
  uint64_t pushed_ = 0;
  uint64_t finished_ = 0;
  bool started_ = false;
  std::optional<std::string> error_;
};

}  // namespace fake
