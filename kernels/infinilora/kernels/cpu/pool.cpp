// Workers sleep on a futex after a bounded spin, so an idle pool costs nothing and a busy one wakes quickly.
// One job at a time.
#include "pool.h"

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace il {
namespace {

constexpr int kPauses = 64;  // looks before the first sched_yield: about 2 us, less than a wake-up costs

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `ready()`: a short spin, then giving the core away for up to `spin_ns`, then asleep on `word`.
template <class Ready>
void wait_until(std::atomic<uint32_t>& word, std::atomic<int>& sleepers, int64_t spin_ns, const Ready& ready) {
  for (int i = 0; i < kPauses; ++i) {
    if (ready()) return;
    pause_cpu();
  }
  for (int64_t end = now_ns() + spin_ns; now_ns() < end;) {
    if (ready()) return;
    sched_yield();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (true) {
    uint32_t seen = word.load(std::memory_order_seq_cst);
    if (ready()) break;
    futex_wait(word, seen);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// What the workers may see of a job. `work` holds the job's number above and the chunks not yet taken below.
// A chunk is taken by compare-and-swap: where it succeeds, `work` held chunks of that very job since it was
// read, so the job was not over and its fields did not change meanwhile. A worker that was away for long
// fails to take a chunk, harms nothing, and is waited for by nobody.
struct Pool {
  pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER;  // only ever tried by a job, never waited for
  pthread_t workers[kMaxThreads];
  std::atomic<int> num_workers{0};  // changed under the caller's lock, read by whoever has work
  std::atomic<bool> stop{false};
  std::atomic<int64_t> spin_ns{100000};  // longer than the Python between two operations of one layer
  int64_t brief_ns = INT64_MIN / 2;      // when the last brief job was over; under the caller's lock

  std::atomic<const void*> data{nullptr};
  std::atomic<RunChunk> run{nullptr};
  std::atomic<uint32_t> num_chunks{0};
  alignas(64) std::atomic<uint64_t> work{0};
  alignas(64) std::atomic<uint32_t> left{0};    // chunks not yet finished; the caller sleeps on it
  std::atomic<int> sleeping_caller{0};
  alignas(64) std::atomic<uint32_t> ticket{0};  // raised for each job; workers sleep on it
  std::atomic<int> sleeping_workers{0};
};

Pool pool;
thread_local bool in_job = false;

constexpr int kMaxOwed = 8;  // links of a step to which one thread sends before it computes
thread_local uint32_t* owed[kMaxOwed];
thread_local int num_owed = 0;

constexpr uint64_t kChunkMask = 0xffffffff;

void take_chunks(int thread) {
  in_job = true;
  uint64_t seen = pool.work.load(std::memory_order_acquire);
  while ((seen & kChunkMask) != 0) {
    const void* data = pool.data.load(std::memory_order_relaxed);
    RunChunk run = pool.run.load(std::memory_order_relaxed);
    uint32_t num_chunks = pool.num_chunks.load(std::memory_order_relaxed);
    if (!pool.work.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
    run(data, static_cast<int>(num_chunks - static_cast<uint32_t>(seen & kChunkMask)), thread);
    if (pool.left.fetch_sub(1, std::memory_order_seq_cst) == 1 && pool.sleeping_caller.load()) futex_wake(pool.left);
    seen = pool.work.load(std::memory_order_acquire);
  }
  in_job = false;
}

struct Start {
  int thread;
  uint32_t ticket;
};

void* work(void* argument) {
  Start start = *static_cast<Start*>(argument);
  free(argument);
  uint32_t seen = start.ticket;
  while (true) {
    auto changed = [&] { return pool.ticket.load(std::memory_order_acquire) != seen; };
    wait_until(pool.ticket, pool.sleeping_workers, pool.spin_ns.load(std::memory_order_relaxed), changed);
    seen = pool.ticket.load(std::memory_order_acquire);
    if (pool.stop.load(std::memory_order_acquire)) return nullptr;
    take_chunks(start.thread);
  }
}

void announce(bool wake) {
  pool.ticket.fetch_add(1, std::memory_order_seq_cst);
  if (wake && pool.sleeping_workers.load(std::memory_order_seq_cst)) futex_wake(pool.ticket);
}

void stop_workers() {
  pool.stop.store(true, std::memory_order_release);
  announce(true);
  for (int i = 0; i < pool.num_workers; ++i) pthread_join(pool.workers[i], nullptr);
  pool.num_workers = 0;
  pool.stop.store(false, std::memory_order_release);
}

void start_workers(int count) {
  for (int i = 0; i < count; ++i) {
    auto* start = static_cast<Start*>(malloc(sizeof(Start)));
    *start = {i + 1, pool.ticket.load(std::memory_order_relaxed)};
    if (pthread_create(&pool.workers[pool.num_workers], nullptr, work, start) != 0) {
      free(start);  // fewer threads than asked for: still right, and num_threads() says so
      return;
    }
    ++pool.num_workers;
  }
}

// A forked child has no workers: it starts over with none, and works alone until it sets its own.
void forget_workers() {
  pool.num_workers = 0;
  pool.sleeping_workers.store(0);
  pool.sleeping_caller.store(0);
  pool.caller_lock = PTHREAD_MUTEX_INITIALIZER;
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, forget_workers); }

void run_alone(int num_chunks, const void* data, RunChunk run) {
  for (int chunk = 0; chunk < num_chunks; ++chunk) run(data, chunk, 0);
}

// A worker that is woken for a brief job comes too late for it, and is awake for the next, if that is soon.
bool come_often() {
  return pool.sleeping_workers.load(std::memory_order_relaxed) &&
         now_ns() - pool.brief_ns < pool.spin_ns.load(std::memory_order_relaxed) / 2;
}

void run_job(int num_chunks, const void* data, RunChunk run, bool is_brief) {
  bool alone = num_chunks <= 1 || pool.num_workers == 0 || in_job;
  if (alone || pthread_mutex_trylock(&pool.caller_lock) != 0) {
    wake_owed();
    return run_alone(num_chunks, data, run);
  }

  pool.data.store(data, std::memory_order_relaxed);
  pool.run.store(run, std::memory_order_relaxed);
  pool.num_chunks.store(num_chunks, std::memory_order_relaxed);
  pool.left.store(num_chunks, std::memory_order_relaxed);
  uint64_t number = (pool.work.load(std::memory_order_relaxed) >> 32) + 1;
  pool.work.store(number << 32 | static_cast<uint32_t>(num_chunks), std::memory_order_release);
  announce(!is_brief || come_often());
  wake_owed();
  take_chunks(0);
  wait_until(pool.left, pool.sleeping_caller, pool.spin_ns.load(std::memory_order_relaxed),
             [] { return pool.left.load(std::memory_order_acquire) == 0; });
  if (is_brief) pool.brief_ns = now_ns();
  pthread_mutex_unlock(&pool.caller_lock);
}

}  // namespace

int num_threads() { return pool.num_workers + 1; }

void wake_after_next_job(uint32_t* word) {
  for (int i = 0; i < num_owed; ++i)
    if (owed[i] == word) return;
  if (num_owed == kMaxOwed) wake_owed();
  owed[num_owed++] = word;
  if (pool.num_workers == 0) wake_owed();
}

void wake_owed() {
  for (int i = 0; i < num_owed; ++i) syscall(SYS_futex, owed[i], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  num_owed = 0;
}

void parallel_for(int num_chunks, const void* job, RunChunk run) { run_job(num_chunks, job, run, false); }

void parallel_for_brief(int num_chunks, const void* job, RunChunk run) { run_job(num_chunks, job, run, true); }

namespace {

struct Scratch {
  void* memory;
  size_t bytes;
};

pthread_key_t scratch_key;

void free_scratch(void* value) {
  for (int use = 0; use < kScratchUses; ++use) free(static_cast<Scratch*>(value)[use].memory);
  free(value);
}

__attribute__((constructor)) void make_key() { pthread_key_create(&scratch_key, free_scratch); }

}  // namespace

void* scratch(size_t bytes, ScratchUse use) {
  auto* all = static_cast<Scratch*>(pthread_getspecific(scratch_key));
  if (all == nullptr) {
    all = static_cast<Scratch*>(calloc(kScratchUses, sizeof(Scratch)));
    if (all == nullptr) abort();
    pthread_setspecific(scratch_key, all);
  }
  Scratch& mine = all[use];
  if (mine.bytes < bytes) {
    free(mine.memory);
    mine.bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    mine.memory = aligned_alloc(64, mine.bytes);
    if (mine.memory == nullptr) abort();
  }
  return mine.memory;
}

}  // namespace il

extern "C" {

// Makes the pool `threads` wide, the caller included. Waits for a running job; not to be called inside one, nor made
// wider while another thread computes: attention counts the threads before its job begins.
int il_set_threads(int threads) {
  using namespace il;
  int workers = threads < 1 ? 0 : (threads > kMaxThreads ? kMaxThreads : threads) - 1;
  pthread_mutex_lock(&pool.caller_lock);
  if (workers != pool.num_workers) {
    stop_workers();
    start_workers(workers);
  }
  pthread_mutex_unlock(&pool.caller_lock);
  return num_threads();
}

int il_num_threads() { return il::num_threads(); }

void il_set_spin(int64_t nanoseconds) { il::pool.spin_ns.store(nanoseconds); }
}
