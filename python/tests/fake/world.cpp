#include "world.h"

#include <chrono>

namespace fake {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

const char* title(const Conflict& conflict, const Op& op) {
  if (conflict.after_free) {
    return "use after free";
  }
  if (op.role == Role::Free) {
    return "freed in use";
  }
  return conflict.with.role == Role::Allocate ? "access before allocation" : "race";
}

const char* verb(Role role, bool writes) {
  switch (role) {
    case Role::Allocate:
      return "allocates";
    case Role::Free:
      return "frees";
    case Role::Use:
      break;
  }
  return writes ? "writes" : "reads";
}

}  // namespace

// Never destroyed: the threads of the streams use it until the process ends.
World& World::get() {
  static World* world = new World();
  return *world;
}

World::World() {
  for (int device = 0; device < kDevices; ++device) {
    streams_[device].push_back(std::make_unique<Stream>(device, 0, actors_++, lateness));
  }
}

Stream& World::stream(int device, int64_t index) {
  const std::lock_guard<std::mutex> lock(mutex);
  return *streams_.at(device).at(index);
}

Stream& World::new_stream(int device) {
  point("stream");
  const std::lock_guard<std::mutex> lock(mutex);
  auto& streams = streams_.at(device);
  const int64_t index = next_stream_[device]++ % kStreams + 1;
  if (index == static_cast<int64_t>(streams.size())) {
    streams.push_back(std::make_unique<Stream>(device, index, actors_++, lateness));
  }
  return *streams[index];
}

std::shared_ptr<const Call> World::call_locked(const std::string& what) {
  host_.tick(kHost);
  auto call = std::make_shared<const Call>(Call{++calls_, what});
  if (tracing_) {
    trace_.push_back("#" + std::to_string(call->number) + " " + what);
  }
  return call;
}

void World::launch(Stream& stream, const std::string& what, const std::vector<Access>& accesses, Job job) {
  const std::lock_guard<std::mutex> lock(mutex);
  launch_locked(stream, what, accesses, std::move(job), Role::Use);
}

void World::launch_locked(
    Stream& stream,
    const std::string& what,
    const std::vector<Access>& accesses,
    Job job,
    Role role,
    const std::vector<Moment>& behind) {
  auto call = call_locked(what + " on " + stream.name());
  stream.clock.join(host_);
  stream.clock.tick(stream.actor);
  Op op{stream.actor, stream.clock, std::move(call), role};
  for (const Moment& moment : behind) {
    op.clock.join(moment.clock);
  }
  for (const Access& access : accesses) {
    check_locked(access, op);
  }
  if (job) {
    stream.push(std::move(job));
  }
}

Moment World::record(Stream& stream) {
  point("event");
  const std::lock_guard<std::mutex> lock(mutex);
  return record_locked(stream);
}

Moment World::record_locked(Stream& stream) {
  call_locked("record on " + stream.name());
  stream.clock.join(host_);
  auto passed = std::make_shared<std::atomic<int64_t>>(0);
  const uint64_t position = stream.push([passed] { passed->store(now_ns()); });
  return {&stream, position, stream.clock, std::move(passed)};
}

void World::wait(Stream& stream, const Moment& moment) {
  point("wait");
  const std::lock_guard<std::mutex> lock(mutex);
  call_locked("wait of " + stream.name() + " for " + moment.stream->name());
  stream.clock.join(host_);
  stream.clock.join(moment.clock);
  if (moment.stream != &stream) {
    stream.push([from = moment.stream, position = moment.position] { from->wait(position); });
  }
}

bool World::query(const Moment& moment) {
  if (!moment.stream->reached(moment.position)) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  host_.join(moment.clock);
  return true;
}

void World::sync(const Moment& moment) {
  point("sync");
  moment.stream->wait(moment.position);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    call_locked("host waits for an event of " + moment.stream->name());
    host_.join(moment.clock);
  }
  if (auto error = moment.stream->take_error()) {
    throw Failure(*error);
  }
}

bool World::query(Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!stream.reached(stream.pushed())) {
    return false;
  }
  host_.join(stream.clock);
  return true;
}

void World::sync(Stream& stream) {
  point("sync");
  wait_for(stream);
}

void World::wait_for(Stream& stream) {
  uint64_t position = 0;
  Clock clock;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    call_locked("host waits for " + stream.name());
    position = stream.pushed();
    clock = stream.clock;
  }
  stream.wait(position);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    host_.join(clock);
  }
  if (auto error = stream.take_error()) {
    throw Failure(*error);
  }
}

void World::sync_device(int device) {
  point("sync");
  std::vector<Stream*> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& stream : streams_.at(device)) {
      streams.push_back(stream.get());
    }
  }
  for (Stream* stream : streams) {
    wait_for(*stream);
  }
}

void World::host(const std::string& what, const Access& access) {
  const std::lock_guard<std::mutex> lock(mutex);
  host_locked(what, access, Role::Use);
}

void World::host_locked(
    const std::string& what,
    const Access& access,
    Role role,
    const std::vector<Moment>& behind) {
  auto call = call_locked(what + " by the host");
  Op op{kHost, host_, std::move(call), role};
  for (const Moment& moment : behind) {
    op.clock.join(moment.clock);
  }
  check_locked(access, op);
}

void World::check_locked(const Access& access, const Op& op) {
  for (const Conflict& conflict : shadow_.access(access, op)) {
    report_locked(conflict, op, access.writes);
  }
}

void World::report_locked(const Conflict& conflict, const Op& op, bool writes) {
  const Call& first = *conflict.with.call;
  const Call& second = *op.call;
  if (!reported_.emplace(first.number, second.number, conflict.after_free).second) {
    return;
  }
  std::string text = title(conflict, op);
  text += ": #" + std::to_string(second.number) + " " + second.what + " " + verb(op.role, writes) + " ";
  text += describe_locked ? describe_locked(conflict.range) : std::string("memory");
  text += conflict.after_free ? ", which was given back by #" : ", not ordered after #";
  text += std::to_string(first.number) + " " + first.what;
  if (!conflict.after_free) {
    text += std::string(", which ") + verb(conflict.with.role, conflict.with.writes) + " it";
  }
  reports_.push_back(std::move(text));
}

void World::point(const std::string& kind) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto planned = planned_.find(kind);
  if (planned == planned_.end() || --planned->second > 0) {
    return;
  }
  planned_.erase(planned);
  throw Failure(kind + ": made to fail");
}

void World::fail_next(const std::string& kind, int64_t nth) {
  const std::lock_guard<std::mutex> lock(mutex);
  planned_.erase(kind);
  if (nth > 0) {
    planned_[kind] = nth;
  }
}

std::vector<std::string> World::reports() {
  const std::lock_guard<std::mutex> lock(mutex);
  return reports_;
}

void World::clear_reports() {
  const std::lock_guard<std::mutex> lock(mutex);
  reports_.clear();
  reported_.clear();
}

void World::trace(bool on) {
  const std::lock_guard<std::mutex> lock(mutex);
  tracing_ = on;
  trace_.clear();
}

std::vector<std::string> World::traced() {
  const std::lock_guard<std::mutex> lock(mutex);
  return trace_;
}

void World::count(const std::string& name, int64_t by) {
  const std::lock_guard<std::mutex> lock(mutex);
  counters_[name] += by;
}

std::map<std::string, int64_t> World::counters() {
  const std::lock_guard<std::mutex> lock(mutex);
  return counters_;
}

}  // namespace fake
