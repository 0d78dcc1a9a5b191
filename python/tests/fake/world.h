// The machine: streams, events, the checker, statistics and planned failures.
//
// Every public function takes the lock of the world itself, unless its name ends in `_locked`; those are
// for the allocators, which hold it. The lock is never held while anybody waits. Order is checked when
// work is queued, under the lock, so what is reported does not depend on when the work runs.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "shadow.h"
#include "stream.h"

namespace fake {

constexpr int kDevices = 2;

// More streams than this share queues, as on a real device.
constexpr int64_t kStreams = 64;

// A mark in a stream: what an event holds once it was recorded.
struct Moment {
  Stream* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  // Nanoseconds, set when the stream comes by.
  std::shared_ptr<std::atomic<int64_t>> passed;
};

// A call was made to fail, or work on a stream failed earlier.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class World {
 public:
  static World& get();

  // Streams.
  Stream& stream(int device, int64_t index);
  Stream& new_stream(int device);

  // Work. Queues a job that touches the given bytes.
  void launch(Stream& stream, const std::string& what, const std::vector<Access>& accesses, Job job);
  void launch_locked(
      Stream& stream,
      const std::string& what,
      const std::vector<Access>& accesses,
      Job job,
      Role role,
      const std::vector<Moment>& behind = {});

  // Order.
  Moment record(Stream& stream);
  Moment record_locked(Stream& stream);
  void wait(Stream& stream, const Moment& moment);
  bool query(const Moment& moment);
  void sync(const Moment& moment);
  bool query(Stream& stream);
  void sync(Stream& stream);
  void sync_device(int device);

  // The host touches memory itself, now.
  void host(const std::string& what, const Access& access);
  void host_locked(
      const std::string& what,
      const Access& access,
      Role role,
      const std::vector<Moment>& behind = {});

  // Failures: throws when the call was chosen by `fail_next`.
  void point(const std::string& kind);
  // The nth call of a kind from now on fails, counted from 1; 0 takes that back.
  void fail_next(const std::string& kind, int64_t nth);

  // Findings.
  std::vector<std::string> reports();
  void clear_reports();
  void trace(bool on);
  std::vector<std::string> traced();

  // Counters.
  void count(const std::string& name, int64_t by);
  std::map<std::string, int64_t> counters();

  Lateness lateness;
  std::mutex mutex;
  // Names the bytes of a range within their block; set by the allocators.
  std::string (*describe_locked)(Range range) = nullptr;

 private:
  World();

  void wait_for(Stream& stream);
  std::shared_ptr<const Call> call_locked(const std::string& what);
  void check_locked(const Access& access, const Op& op);
  void report_locked(const Conflict& conflict, const Op& op, bool writes);

  Clock host_;
  Shadow shadow_;
  uint64_t calls_ = 0;
  size_t actors_ = kHost + 1;
  std::array<std::vector<std::unique_ptr<Stream>>, kDevices> streams_;
  std::array<int64_t, kDevices> next_stream_{};
  std::map<std::string, int64_t> planned_;
  std::vector<std::string> reports_;
  std::set<std::tuple<uint64_t, uint64_t, bool>> reported_;
  bool tracing_ = false;
  std::vector<std::string> trace_;
  std::map<std::string, int64_t> counters_;
};

}  // namespace fake
