// Waiting for the other end, and waking it. A reader spins for a bounded time, then sleeps on its bell (a futex word);
// a writer wakes it only when it says that it sleeps.
#pragma once

#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "layout.h"

namespace il {  // of the kernels' threads, in the same library (kernels/cpu/pool.h)
void wake_after_next_job(uint32_t* word);
void wake_owed();
}

namespace {

constexpr int64_t kShortSpinNs = 5'000;  // before any yield; and all the spinning there is on a crowded core
constexpr int64_t kLongYieldNs = 50'000;  // a yield that took so long gave the core to somebody who keeps it
constexpr uint32_t kCrowdedWaits = 64;  // for so many waits: a sleeper is woken sooner than a yielder gets its turn
constexpr int64_t kSleepSliceNs = 20'000'000;  // a lost wake-up (a peer without this library) costs at most this

// What a call that may wait returns. As Status in ring.py.
enum Status : int { kOk = 0, kTimeout = 1, kClosed = 2, kRefused = 3, kBlocked = 4, kCorrupt = 5 };

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// FUTEX_WAIT and FUTEX_WAKE without the private flag: the word is in shared memory.
void futex_sleep(uint32_t* word, uint32_t expected, int64_t ns) {
  timespec t{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

void wake(Signals& end) {
  __atomic_fetch_add(&end.bell, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &end.bell, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

bool is_waiting(const Signals& end) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // what was published is visible before `waiting` is read
  return load(&end.waiting);
}

void wake_if_waiting(Signals& end) {
  if (is_waiting(end)) wake(end);
}

// The same, but the caller's next product comes first: a sleeper is often put on the core that wakes it, and computes
// there while the others would have nothing to do. The bell has rung, so whoever is about to sleep looks again.
void wake_behind_next_job(Signals& end) {
  if (!is_waiting(end)) return;
  __atomic_fetch_add(&end.bell, 1, __ATOMIC_SEQ_CST);
  il::wake_after_next_job(&end.bell);
}

bool is_shut(const Signals& end) { return load(&end.state) >= kShut; }

// Let others have the core, as long as they give it back soon. On an idle core a yield costs nothing and the
// waiter stays awake; on a crowded one a yielder waits for a whole time slice, and a sleeper is woken at once.
void yield(Rings& r, int64_t now) {
  sched_yield();
  if (now_ns() - now > kLongYieldNs) r.crowded = kCrowdedWaits;
}

// Wait until ready(): spin, then sleep on `mine`. What arrived before a close is still delivered.
template <class Ready> Status await(Rings& r, Signals& mine, Signals& peer, int64_t deadline, Ready ready) {
  if (ready()) return kOk;
  const int64_t start = now_ns();
  if (r.crowded) --r.crowded;
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return kOk;
      relax();
    }
    if (is_shut(mine) || is_shut(peer)) return ready() ? kOk : kClosed;
    const int64_t now = now_ns();
    if (now >= deadline) return kTimeout;
    if (now - start < (r.crowded ? kShortSpinNs : r.spin_ns)) {
      if (now - start >= kShortSpinNs) yield(r, now);
      continue;
    }
    __atomic_store_n(&mine.waiting, 1u, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const uint32_t bell = load(&mine.bell);
    if (!ready() && !is_shut(mine) && !is_shut(peer)) {
      const int64_t left = deadline - now;
      futex_sleep(&mine.bell, bell, left < kSleepSliceNs ? left : kSleepSliceNs);
    }
    store(&mine.waiting, 0u);
  }
}

int64_t deadline_after(int64_t timeout_ns) { return now_ns() + timeout_ns; }

}  // namespace
