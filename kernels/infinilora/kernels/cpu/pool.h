// The one thread pool of the process. Knows no kernel.
//
// A job is `num_chunks` calls of `run(job, chunk, thread)`. Chunks are taken from an atomic counter by the
// caller and by whichever workers are awake, so the work divides itself: a core that is lent to another
// process takes fewer chunks, and a worker that wakes late finds the job done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace il {

constexpr int kMaxThreads = 256;

using RunChunk = void (*)(const void* job, int chunk, int thread);

// Runs every chunk, and returns when all are done. May be called from any thread; while the pool is busy
// with another caller's job, or inside one, the caller runs its chunks alone.
void parallel_for(int num_chunks, const void* job, RunChunk run);

// The same for a job that is over before a sleeping worker had come: by those that are awake. The others are woken
// only where such jobs come one after another.
void parallel_for_brief(int num_chunks, const void* job, RunChunk run);

// `body(chunk, thread)` for each chunk.
template <class Body>
void parallel_chunks(int num_chunks, const Body& body, bool is_brief = false) {
  (is_brief ? parallel_for_brief : parallel_for)(num_chunks, &body, [](const void* job, int chunk, int thread) {
    (*static_cast<const Body*>(job))(chunk, thread);
  });
}

int num_threads();

// Wakes whoever sleeps on `word` (a futex that processes share) once this thread's next job is given to the workers, or
// at `wake_owed`: who is woken may take the very core of the waker, which has the others' work still to give. At once
// where there are no workers. The word's memory may be gone by then.
void wake_after_next_job(uint32_t* word);

// Wakes whom this thread still has to.
void wake_owed();

// Which of `count` pieces a thread takes next. Each goes through a run of its own in order, so that what it fetches
// ahead is what it takes next, and then takes from the far end of another's run. Every piece is taken once.
class Shares {
 public:
  Shares(int count, int threads) : threads_(threads) {
    for (int t = 0; t < threads; ++t)
      new (&runs_[t]) std::atomic<uint64_t>(run(first_of(count, t, threads), first_of(count, t + 1, threads)));
  }

  // The first piece of a thread's run.
  static int first_of(int count, int thread, int threads) {
    return static_cast<int>(static_cast<int64_t>(count) * thread / threads);
  }

  // -1 when all are taken.
  int take(int thread) {
    for (int i = 0; i < threads_; ++i) {
      std::atomic<uint64_t>& mine = runs_[(thread + i) % threads_].left;
      uint64_t seen = mine.load(std::memory_order_relaxed);
      while (true) {
        uint32_t first = static_cast<uint32_t>(seen >> 32), end = static_cast<uint32_t>(seen);
        if (first >= end) break;
        uint64_t rest = i == 0 ? run(first + 1, end) : run(first, end - 1);
        if (mine.compare_exchange_weak(seen, rest, std::memory_order_relaxed))
          return static_cast<int>(i == 0 ? first : end - 1);
      }
    }
    return -1;
  }

 private:
  // In a line of its own: until a thread has done its run, nobody else writes there.
  struct alignas(64) Run {
    Run() {}  // only as many as there are threads are ever written
    union { std::atomic<uint64_t> left; };
  };

  static uint64_t run(uint32_t first, uint32_t end) { return static_cast<uint64_t>(first) << 32 | end; }

  int threads_;
  Run runs_[kMaxThreads];
};

// `body(piece, thread)` for each of `count` pieces: a chunk is all that a thread can get of them, so that from piece to
// piece it writes where nobody else does.
template <class Body>
void parallel_shares(int count, const Body& body, bool is_brief = false) {
  Shares shares(count, num_threads());
  const int takers = count < num_threads() ? count : num_threads();
  auto take_all = [&](int, int thread) {
    for (int piece; (piece = shares.take(thread)) >= 0;) body(piece, thread);
  };
  parallel_chunks(takers, take_all, is_brief);
}

enum ScratchUse { kOfLaunch = 0, kOfTables = 1 };  // of a kernel; of who calls one
constexpr int kScratchUses = 2;

// At least `bytes` of memory, aligned to 64, that belong to the calling thread until it asks again for this use.
void* scratch(size_t bytes, ScratchUse use = kOfLaunch);

}  // namespace il
