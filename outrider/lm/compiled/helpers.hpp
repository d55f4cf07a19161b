// Threads that help the thread of a pass with its larger pieces of work, wherever a core has nothing else to do.
//
// Work is cut into chunks, and the next chunk goes to whichever thread is there. The thread of the pass takes
// chunks too. At the end it waits for chunks that are being computed, never for a thread to arrive, as OpenMP's
// barriers do. Helpers run only on cores that are idle (SCHED_IDLE), so what else runs on the machine loses
// nothing to them, and a machine without an idle core computes as if there were none.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

namespace outrider {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Polls for about `limit`; returns whether `is_done` came true.
template <typename IsDone>
bool spin_until(std::chrono::microseconds limit, const IsDone& is_done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_done()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

class Helpers {
 public:
  using Body = void (*)(int64_t low, int64_t high, const void* context);

  // The helpers of this process, which all libraries share: an inline function's static is one symbol.
  static Helpers& instance() {
    static Helpers* made = new Helpers;  // never deleted: its threads may outlive the end of main
    // A forked child has none of the threads.
    [[maybe_unused]] static const int forks = pthread_atfork(nullptr, nullptr, [] { made = new Helpers; });
    return *made;
  }

  // Runs body over [0, count) in chunks of `chunk`, with at most `helpers` threads beside the caller.
  // The caller is alone while helpers are busy with another thread's work. Throws std::bad_alloc if a body throws.
  void run(int64_t count, int64_t chunk, int helpers, Body body, const void* context) {
    if (is_taken_.test_and_set(std::memory_order_acquire)) {
      body(0, count, context);
      return;
    }
    start(helpers);
    body_ = body, context_ = context, count_ = count, chunk_ = chunk;
    failed_.store(false, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    work_number_.fetch_add(1);  // odd: helpers may enter
    if (asleep_.load() > 0) wake_.notify_all();  // a helper that misses it comes to the next work
    take_chunks();
    work_number_.fetch_add(1);
    wait_for_helpers();
    const bool failed = failed_.load(std::memory_order_relaxed);
    is_taken_.clear(std::memory_order_release);
    if (failed) throw std::bad_alloc();
  }

 private:
  using us = std::chrono::microseconds;

  void start(int helpers) {
    if (started_ >= helpers) return;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the interpreter's threads
    for (; started_ < helpers; ++started_) std::thread([this] { help(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void take_chunks() noexcept {
    try {
      for (;;) {
        const int64_t low = next_.fetch_add(chunk_, std::memory_order_relaxed);
        if (low >= count_) return;
        body_(low, std::min(low + chunk_, count_), context_);
      }
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);
    }
  }

  void wait_for_helpers() {
    const auto none = [this] { return inside_.load() == 0; };
    if (spin_until(us(20), none)) return;
    // A helper lost its core amid a chunk; while this thread sleeps, the helper may have this core.
    std::unique_lock<std::mutex> lock(mutex_);
    is_waiting_.store(true);
    none_inside_.wait(lock, none);
    is_waiting_.store(false);
  }

  void help() {
#if defined(SCHED_IDLE)
    sched_param unused{};
    sched_setscheduler(0, SCHED_IDLE, &unused);
    pthread_setname_np(pthread_self(), "outrider-helper");
#endif
    for (uint64_t seen = 0;;) {
      uint64_t number = 0;
      const auto has_work = [&] { return ((number = work_number_.load()) & 1) && number != seen; };
      // The works of a pass follow one another within some ten microseconds.
      if (!spin_until(us(100), has_work)) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(lock, has_work);
        asleep_.fetch_sub(1);
      }
      seen = number;
      inside_.fetch_add(1);
      // Only now does the caller wait for this helper: the work may have ended before.
      if (work_number_.load() == number) take_chunks();
      if (inside_.fetch_sub(1) == 1 && is_waiting_.load()) {
        std::lock_guard<std::mutex> lock(mutex_);
        none_inside_.notify_one();
      }
    }
  }

  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  int started_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0, chunk_ = 1;
  std::atomic<bool> failed_{false};
  // Each on a cache line of its own: many threads write to them.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> work_number_{0};  // of the current work, odd; even: there is none
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> is_waiting_{false};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_, none_inside_;
};

}  // namespace outrider
