#include "stream.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace fake {

namespace {

// What a pause is in the job under way on this thread.
thread_local std::function<void()> pause_here;

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::string Stream::name() const {
  return "fake:" + std::to_string(device) + "/" + std::to_string(index);
}

uint64_t Stream::push(Job job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    // Streams live as long as the process, so nobody joins their threads.
    std::thread([this] { work(); }).detach();
    started_ = true;
  }
  jobs_.push_back(std::move(job));
  queued_.notify_one();
  return ++pushed_;
}

uint64_t Stream::pushed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Stream::reached(uint64_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ >= position;
}

void Stream::wait(uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return finished_ >= position; });
}

std::optional<std::string> Stream::take_error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(error_, std::nullopt);
}

void Stream::pause() {
  if (pause_here) {
    pause_here();
  }
}

void Stream::work() {
  for (uint64_t position = 1;; ++position) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      queued_.wait(lock, [&] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    pause_here = [this, position] { sleep(position, 1); };
    sleep(position, 0);
    std::optional<std::string> error;
    try {
      job();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    // What the job holds has to be gone before anybody learns that it is done.
    job = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error && !error_) {
      error_ = std::move(error);
    }
    finished_ = position;
    done_.notify_all();
  }
}

void Stream::sleep(uint64_t position, uint64_t salt) const {
  const uint64_t most = lateness_.max_us.load();
  if (most == 0) {
    return;
  }
  const uint64_t draw = mix(mix(mix(lateness_.seed.load()) ^ (actor * 2 + salt)) ^ position);
  // Most jobs start at once, some are late, few are very late. Pauses within a job are never left out.
  const uint64_t chance = salt == 0 ? draw % 32 : draw % 4;
  if (chance > 3) {
    return;
  }
  const uint64_t us = (draw >> 8) % most * (chance == 0 ? 8 : 1);
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace fake
