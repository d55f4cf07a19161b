// Threads that help the thread of a pass with its larger pieces of work, wherever a core has nothing else to do.
//
// Work is cut into chunks, and the next chunk goes to whichever thread is there. The thread of the pass takes
// chunks too. At the end it waits for chunks that are being computed, never for a thread to arrive, as OpenMP's
// barriers require. Helpers run under SCHED_IDLE: only on cores that are idle, as far as their own control group
// knows. A helper that loses its core amid a chunk does delay the pass; helpers then rest for some passes.
//
// For Linux: no thread waits for a lock, since a helper that holds one might not run for long.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <new>
#include <thread>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace outrider {

using us = std::chrono::microseconds;
using Word = std::atomic<uint32_t>;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Polls for about `limit`; returns whether `is_done` came true.
template <typename IsDone>
bool spin_until(us limit, const IsDone& is_done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_done()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Sleeps while the word has this value; may return earlier.
inline void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void wake_all(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// How many threads compute the passes that the calling thread runs, itself included; 0: as many as torch has.
// Libraries built by g++ share the variable.
inline uint32_t& compute_threads() {
  static thread_local uint32_t number = 0;
  return number;
}

class Helpers {
 public:
  using Body = void (*)(int64_t low, int64_t high, const void* context);

  // The helpers of this process. With g++ all libraries share them: an inline function's static is one symbol.
  static Helpers& instance() {
    static Helpers* made = new Helpers;  // never deleted: its threads may outlive the end of main
    // A forked child has none of the threads.
    [[maybe_unused]] static const int forks = pthread_atfork(nullptr, nullptr, [] { made = new Helpers; });
    return *made;
  }

  // Runs body over [0, count) in chunks of `chunk`, with at most `helpers` threads beside the caller.
  // The caller is alone while helpers rest, or are busy with another thread's work. Throws what body throws,
  // or std::bad_alloc.
  void run(int64_t count, int64_t chunk, int helpers, Body body, const void* context) {
    if (is_taken_.test_and_set(std::memory_order_acquire)) {
      body(0, count, context);
      return;
    }
    const bool alone = resting_ > 0;
    if (alone)
      --resting_;
    else
      start(helpers);
    body_ = body, context_ = context, count_ = count, chunk_ = chunk;
    if (helpers_.exchange(static_cast<uint32_t>(helpers)) < static_cast<uint32_t>(helpers)) wake_all(helpers_);
    failed_.store(false, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    if (!alone) {
      work_number_.fetch_add(1);  // odd: helpers may enter
      if (asleep_.load() > 0) wake_all(work_number_);
    }
    take_chunks();
    if (!alone) {
      work_number_.fetch_add(1);
      wait_for_helpers();
    }
    const bool failed = failed_.load(std::memory_order_relaxed);
    is_taken_.clear(std::memory_order_release);
    if (failed) throw std::bad_alloc();
  }

 private:
  static constexpr us LATE{1000};
  static constexpr int REST = 1000;  // works: some ten passes

  void start(int helpers) {
    if (started_ >= std::min(helpers, most_)) return;
    sigset_t blocked, before;  // signals are for the interpreter's threads, but for those of a fault
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    try {
      for (; started_ < std::min(helpers, most_); ++started_)
        std::thread([this, index = started_] { help(index); }).detach();
    } catch (...) {
      most_ = started_;  // the system has no room for more threads
    }
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
    const auto began = std::chrono::steady_clock::now();
    is_waiting_.store(true);
    while (const uint32_t inside = inside_.load()) sleep_while(inside_, inside);
    is_waiting_.store(false);
    if (std::chrono::steady_clock::now() - began > LATE) resting_ = REST;
  }

  void help(int index) {
    sched_param unused{};
    if (sched_setscheduler(0, SCHED_IDLE, &unused) != 0) setpriority(PRIO_PROCESS, 0, 19);  // of this thread
    pthread_setname_np(pthread_self(), "outrider-helper");
    for (uint32_t seen = 0;;) {
      if (const uint32_t wanted = helpers_.load(); static_cast<uint32_t>(index) >= wanted) {
        sleep_while(helpers_, wanted);  // until a work wants more helpers
        continue;
      }
      uint32_t number = 0;
      const auto has_work = [&] { return ((number = work_number_.load()) & 1) && number != seen; };
      // The works of a pass follow one another within some ten microseconds.
      if (!spin_until(us(100), has_work)) {
        asleep_.fetch_add(1);
        sleep_while(work_number_, number);
        asleep_.fetch_sub(1);
        continue;
      }
      seen = number;
      inside_.fetch_add(1);
      // Only now does the caller wait for this helper: the work may have ended before.
      if (work_number_.load() == number && static_cast<uint32_t>(index) < helpers_.load()) take_chunks();
      if (inside_.fetch_sub(1) == 1 && is_waiting_.load()) wake_all(inside_);
    }
  }

  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  int started_ = 0, most_ = INT_MAX, resting_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0, chunk_ = 1;
  Word helpers_{0};  // wanted by the latest work; others sleep
  std::atomic<bool> failed_{false};
  // What many threads write to lies on cache lines of its own.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) Word work_number_{0};  // of the current work, odd; even: there is none
  alignas(64) Word inside_{0};
  alignas(64) std::atomic<bool> is_waiting_{false};
  std::atomic<int> asleep_{0};
};

}  // namespace outrider
