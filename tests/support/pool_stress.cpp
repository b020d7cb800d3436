// The kernels' thread pool under stress: several callers at once, jobs of every kind, pauses in which workers fall
// asleep, and a width that changes meanwhile. Every piece must be taken once.
//
//   pool_stress JOBS THREADS CALLERS SPIN_US
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <pthread.h>
#include <unistd.h>

#include "pool.h"

extern "C" int il_set_threads(int threads);
extern "C" void il_set_spin(int64_t nanoseconds);

namespace {

constexpr int kMostPieces = 40, kResizes = 20;
int jobs;

struct Dice {
  uint32_t state;
  int below(int n) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return int(state % uint32_t(n));
  }
};

void make(Dice& dice, int kind, bool is_brief) {
  int taken[kMostPieces] = {};
  const int count = dice.below(kMostPieces);
  auto take = [&](int piece, int thread) {
    if (thread < 0 || thread >= il::kMaxThreads) abort();
    memset(il::scratch(size_t(64 + piece)), piece, 64);
    ++taken[piece];
  };
  auto take_inside = [&](int piece, int) {
    // Parts run beside one another where the job around them runs alone: one of them counts.
    il::parallel_chunks(1 + piece % 3, [&](int part, int) { if (part == 0) ++taken[piece]; }, is_brief);
  };
  if (kind == 0) il::parallel_chunks(count, take, is_brief);
  else if (kind == 1) il::parallel_shares(count, take, is_brief);
  else il::parallel_chunks(count, take_inside, is_brief);
  for (int piece = 0; piece < count; ++piece) {
    if (taken[piece] == 1) continue;
    fprintf(stderr, "piece %d of %d was taken %d times by a job of kind %d\n", piece, count, taken[piece], kind);
    abort();
  }
}

void* call(void* number) {
  Dice dice{uint32_t(reinterpret_cast<uintptr_t>(number)) * 2654435761u + 1};
  uint32_t bell = 0;
  for (int i = 0; i < jobs; ++i) {
    if (dice.below(4) == 0) il::wake_after_next_job(&bell);
    const int kind = dice.below(3);
    make(dice, kind, dice.below(2));
    if (dice.below(16) == 0) il::wake_owed();
    if (dice.below(64) == 0) usleep(useconds_t(dice.below(400)));
  }
  il::wake_owed();
  return nullptr;
}

}  // namespace

int main(int, char** words) {
  jobs = atoi(words[1]);
  const int threads = atoi(words[2]), callers = atoi(words[3]);
  il_set_spin(atoi(words[4]) * 1000LL);
  il_set_threads(threads);
  pthread_t others[16];
  for (int i = 0; i < callers; ++i) pthread_create(&others[i], nullptr, call, reinterpret_cast<void*>(uintptr_t(i) + 1));
  for (int i = 0; i < kResizes; ++i) {
    usleep(2000);
    il_set_threads(1 + i % threads);
  }
  for (int i = 0; i < callers; ++i) pthread_join(others[i], nullptr);
  il_set_threads(1);
  puts("ok");
}
