// Two ends of the ring core at full speed: what arrives is exactly what was sent, once, and in its own step.
//
//   ring_stress threads|processes MESSAGES SEED
//
//   life       one pair of rings, until a kill, a quarantine or a close; the next one has new memory
//   step       a plan, some calls of random shape, waited for in any order; now and then left half way
//   message    one chunk of a call, and its answer
//
// Every number that crosses says which step, call, row and column it is of, by `sent` and `wanted` below: a message that
// was lost, doubled, torn, or answered with what belongs to another one cannot look right. In `processes` the parent kills
// either end at any moment and says so to the other, as the control stream of a link does; in `threads` both ends are in one
// process, where ThreadSanitizer sees them. The last line is JSON; exit status 1 and a reason if anything was wrong.

#include "ring.cpp"

#include <csignal>
#include <cstdio>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

int il_level() { return 0; }  // the processor's instruction sets are another test's
void il::parallel_for(int num_chunks, const void* job, void (*run)(const void*, int, int)) {
  for (int chunk = 0; chunk < num_chunks; ++chunk) run(job, chunk, 0);
}
void il::wake_after_next_job(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }
void il::wake_owed() {}

namespace {

constexpr uint64_t kMaxRows = 48, kMaxCols = 40, kMaxCalls = 4;
constexpr int64_t kLongNs = 20'000'000'000;

struct Ledger {  // outlives every life; shared by all processes
  uint64_t messages, stale, refused, plans, quarantines, closes, kills, lives;
  uint64_t step;    // the latest that an engine began
  uint64_t served;  // site frames that servers answered
};

struct Life {
  char* base;
  uint64_t bytes, target, seed;
  Ledger* ledger;
};

struct Dice {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 11;
  }
  uint64_t below(uint64_t n) { return next() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
};

void fail(const char* what, uint64_t step, uint64_t call, uint64_t row) {
  std::fprintf(stderr, "%s: step %llu, call %llu, row %llu\n", what, (unsigned long long)step, (unsigned long long)call,
               (unsigned long long)row);
  std::_Exit(1);
}

// Whole numbers that fp32 holds, scattered over steps, calls and rows.
float sent(uint64_t step, uint64_t call, uint64_t row, uint64_t col) {
  return float((step * 7919 + call * 104729 + row * 1299709 + col * 13) & 0xfffff);
}

float wanted(uint64_t step, uint64_t call, uint64_t row, uint64_t col, uint64_t in_cols) {
  return 3.0f * sent(step, call, row, col % in_cols) + float(call);
}

void pause_now_and_then(Dice& dice) {
  if (dice.one_in(4096)) usleep(useconds_t(dice.below(200)));
  else if (dice.one_in(256)) for (uint64_t i = dice.below(4000); i; --i) relax();
}

void add(uint64_t& count, uint64_t n) { __atomic_fetch_add(&count, n, __ATOMIC_RELAXED); }

// The server ------------------------------------------------------------------------------------------------

struct Served {  // what the frames so far make the next one be
  uint64_t plan, step, call, row;
  Ledger* ledger;
};

// The answer to one frame, which must be the one that follows the last.
int32_t compute(void* program, uint64_t step, uint32_t call, uint32_t, uint32_t row0, uint32_t rows, uint32_t in_cols,
                uint32_t out_cols, uint32_t, uint32_t, uint32_t, uint32_t, const uint32_t*, uint32_t, const float* x, const int32_t*,
                const float*, float* out) {
  auto& seen = *static_cast<Served*>(program);
  const bool is_new_call = row0 == 0;
  const bool follows = seen.step == step ? (is_new_call ? call == seen.call + 1 : call == seen.call && row0 == seen.row)
                                         : step > seen.step && is_new_call && call == 0;
  if (!follows) fail("a request came twice, late, or not at all", step, call, row0);
  if (step != seen.plan) fail("a request came outside of its plan", step, call, row0);
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t c = 0; c < in_cols; ++c)
      if (x[r * in_cols + c] != sent(step, call, row0 + r, c)) fail("a request is not what was sent", step, call, row0 + r);
    for (uint64_t c = 0; c < out_cols; ++c) out[r * out_cols + c] = 3.0f * x[r * in_cols + c % in_cols] + float(call);
  }
  seen.step = step, seen.call = call, seen.row = row0 + rows;
  add(seen.ledger->served, 1);
  return 0;
}

void answer(Server* server, FrameHeader* frame, Served& seen, Dice& dice, uint64_t& sequence) {
  if (frame->kind == kPlan) {
    if (frame->step_id <= seen.plan) fail("a plan came twice or late", frame->step_id, 0, 0);
    seen.plan = frame->step_id;
    add(seen.ledger->plans, 1);
    return il_ring_skip(server);
  }
  if (frame->sequence != sequence) fail("a sequence was left out or came twice", frame->step_id, frame->layer, sequence);
  ++sequence;
  FrameHeader* to = server->reply(frame->sequence);
  compute(&seen, frame->step_id, frame->layer, 0, frame->row_start, frame->rows, frame->in_cols, frame->out_cols, 0, 0,
          0, 0, nullptr, 0, reinterpret_cast<float*>(payload(frame)), nullptr, nullptr, reinterpret_cast<float*>(payload(to)));
  if (dice.one_in(500)) {
    std::memcpy(payload(to), &frame->step_id, 8);
    return il_ring_reply(server, kError, 8);
  }
  il_ring_reply(server, kReply, uint64_t(frame->rows) * frame->out_cols * 4);
}

void serve(Life& life) {
  Dice dice{life.seed * 2 + 1};
  Server* server = il_ring_server_open(life.base, int64_t(dice.below(3)) * 15'000);
  il_ring_mark(life.base, 1, kOpen);
  Served seen{0, 0, 0, 0, life.ledger};
  Times times{};
  uint64_t counts[1] = {}, offset = 0, sequence = 0;
  times.counts = counts;
  for (int status = kOk; status != kClosed;) {
    const bool is_native = dice.one_in(2);
    // While il_ring_serve answers, it counts the sequences that this end counts otherwise.
    const uint64_t before = times.calls;
    status = is_native ? il_ring_serve(server, 50'000'000, compute, &seen, &times, &offset)
                       : il_ring_recv(server, 50'000'000, &offset);
    sequence += times.calls - before;
    if (status == kCorrupt) fail("a frame does not agree with itself", seen.step, seen.call, seen.row);
    if (status == kOk) answer(server, reinterpret_cast<FrameHeader*>(life.base + offset), seen, dice, sequence);
    pause_now_and_then(dice);
  }
  il_ring_free(server);
}

// The engine ------------------------------------------------------------------------------------------------

struct Call {
  Ticket ticket;
  float x[kMaxRows * kMaxCols], out[kMaxRows * kMaxCols];
  bool adds;
};

void make(Call& call, Engine* engine, uint64_t step, uint64_t number, Dice& dice) {
  Ticket& t = call.ticket;
  std::memset(&t, 0, sizeof t);
  const uint64_t rows = 1 + dice.below(dice.one_in(4) ? kMaxRows : 3), in = 1 + dice.below(kMaxCols), out = 1 + dice.below(kMaxCols);
  const uint64_t fit = engine->capacity / (4 * (in > out ? in : out));
  t.header.kind = kSite;
  t.header.rows = uint32_t(rows), t.header.in_cols = uint32_t(in), t.header.out_cols = uint32_t(out);
  t.engine = engine;
  t.x_stride = kMaxCols * 4, t.x_row = in * 4;
  t.rows = rows, t.chunk_rows = fit < rows ? fit : rows;
  t.chunks = uint32_t((rows + t.chunk_rows - 1) / t.chunk_rows);
  t.out_stride = kMaxCols * 4;
  call.adds = dice.one_in(2);
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t c = 0; c < in; ++c) call.x[r * kMaxCols + c] = sent(step, number, r, c);
    for (uint64_t c = 0; c < kMaxCols; ++c) call.out[r * kMaxCols + c] = -1.0f;
  }
}

void check(const Call& call, uint64_t step, uint64_t number) {
  const FrameHeader& h = call.ticket.header;
  for (uint64_t r = 0; r < h.rows; ++r)
    for (uint64_t c = 0; c < kMaxCols; ++c) {
      const float delta = c < h.out_cols ? wanted(step, number, r, c, h.in_cols) : 0.0f;
      const float is = c < h.out_cols && !call.adds ? delta : delta - 1.0f;
      if (call.out[r * kMaxCols + c] != is) fail("an answer is not what was asked for", step, number, r);
    }
}

// Which call is waited for now: any that was sent whole, else the oldest.
uint64_t pick(Call* const* open, uint64_t n, Dice& dice) {
  const uint64_t i = dice.below(n);
  return open[i]->ticket.sent == open[i]->ticket.chunks ? i : 0;
}

int collect(Call& call, Dice& dice) {
  const bool is_hurried = dice.one_in(500);
  const int64_t took = il_ring_collect(&call.ticket, reinterpret_cast<char*>(call.out), call.adds, is_hurried ? 1e-6 : 20.0);
  if (took == -kTimeout && !is_hurried) fail("no answer came", call.ticket.header.step_id, call.ticket.header.layer, 0);
  return took < 0 ? int(-took) : kOk;
}

// One step: kOk, or why the life is over.
int step_of(Engine* engine, Life& life, Call* calls, Dice& dice) {
  Ledger& ledger = *life.ledger;
  const uint64_t step = ++ledger.step;
  FrameHeader plan{};
  plan.kind = kPlan, plan.step_id = step;
  const int status = il_ring_send_plan(engine, &plan, "", 0, kLongNs);
  if (status != kOk) return status;
  Call* open[kMaxCalls];
  const uint64_t n = 1 + dice.below(kMaxCalls);
  uint64_t left = n;
  for (uint64_t i = 0; i < n; ++i) {
    make(calls[i], engine, step, i, dice);
    open[i] = &calls[i];
    il_ring_submit(&calls[i].ticket, step, uint32_t(i), reinterpret_cast<uint64_t>(calls[i].x), 0, 0);
  }
  pause_now_and_then(dice);
  const uint64_t kept = dice.one_in(8) ? dice.below(n + 1) : 0;  // these are left lying
  for (; left > kept; --left) {
    const uint64_t i = pick(open, left, dice);
    const int got = collect(*open[i], dice);
    add(ledger.messages, open[i]->ticket.received);
    if (got == kRefused) {
      uint64_t refused = 0;
      std::memcpy(&refused, life.base + open[i]->ticket.refusal + sizeof(FrameHeader), 8);
      if (refused != step) fail("a refusal is of another step", step, i, refused);
      add(ledger.refused, 1);
      break;
    }
    if (got != kOk) return got;
    check(*open[i], step, uint64_t(open[i] - calls));
    std::memmove(open + i, open + i + 1, (left - i - 1) * sizeof *open);
  }
  il_ring_abandon(engine);
  return kOk;
}

// All that was sent has been answered: what was taken, and what came too late, make it up.
void settle(Engine* engine, Life& life, Call* calls, Dice& dice, uint64_t taken_before) {
  const uint64_t step = ++life.ledger->step;
  FrameHeader plan{};
  plan.kind = kPlan, plan.step_id = step;
  if (il_ring_send_plan(engine, &plan, "", 0, kLongNs) != kOk) fail("the last plan was not taken", step, 0, 0);
  make(calls[0], engine, step, 0, dice);
  il_ring_submit(&calls[0].ticket, step, 0, reinterpret_cast<uint64_t>(calls[0].x), 0, 0);
  const int64_t took = il_ring_collect(&calls[0].ticket, reinterpret_cast<char*>(calls[0].out), calls[0].adds, 20.0);
  add(life.ledger->messages, calls[0].ticket.received);
  if (took < 0 && took != -kRefused) fail("the last answer did not come", step, 0, uint64_t(-took));
  il_ring_abandon(engine);
  while (il_ring_in_flight(engine)) relax();
  if (engine->sent != life.ledger->messages - taken_before + il_ring_stale(engine))
    fail("what was sent is not what was taken and what was dropped", step, engine->sent, il_ring_stale(engine));
}

void drive(Life& life, uint64_t most) {
  Dice dice{life.seed * 2 + 2};
  Engine* engine = il_ring_engine_open(life.base, int64_t(dice.below(3)) * 15'000);
  il_ring_mark(life.base, 0, kOpen);
  auto* calls = static_cast<Call*>(std::calloc(kMaxCalls, sizeof(Call)));
  Ledger& ledger = *life.ledger;
  const uint64_t before = ledger.messages;
  int status = kOk;
  while (status == kOk && ledger.messages < life.target && ledger.messages - before < most) status = step_of(engine, life, calls, dice);
  if (status == kOk) settle(engine, life, calls, dice, before);
  add(ledger.stale, il_ring_stale(engine));
  if (status == kTimeout) {
    il_ring_mark(life.base, 0, kQuarantined);
    add(ledger.quarantines, 1);
  } else if (status == kOk) {
    il_ring_mark(life.base, 0, kShut);
    add(ledger.closes, 1);
  } else if (status != kClosed) {
    fail("a call ended as none should", ledger.step, 0, uint64_t(status));
  }
  std::free(calls);
  il_ring_free(engine);
}

// Lives -----------------------------------------------------------------------------------------------------

void* shared(uint64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("no memory", bytes, 0, 0);
  return at;
}

Life born(Ledger* ledger, uint64_t target, Dice& dice) {
  const uint64_t n = 1 + dice.below(12), buffer = 256 + 64 * dice.below(40), stride = aligned(sizeof(FrameHeader) + buffer);
  const uint64_t bytes = kRingsAt + 2 * n * stride;
  auto* base = static_cast<char*>(shared(bytes));
  auto* file = reinterpret_cast<FileHeader*>(base);
  file->num_buffers = uint32_t(n), file->buffer_bytes = buffer, file->stride = stride;
  ++ledger->lives;
  return {base, bytes, target, dice.next(), ledger};
}

void live_in_threads(Life& life, Dice& dice) {
  pthread_t server;
  pthread_create(&server, nullptr, [](void* at) -> void* { return serve(*static_cast<Life*>(at)), nullptr; }, &life);
  drive(life, 1000 + dice.below(20'000));
  pthread_join(server, nullptr);
}

pid_t child(Life& life, void (*run)(Life&, uint64_t), uint64_t most) {
  const pid_t pid = fork();
  if (pid < 0) fail("no process", 0, 0, 0);
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run(life, most);
    std::_Exit(0);
  }
  return pid;
}

// The end of one process; whether it was killed by us. What it found wrong ends everything.
bool was_killed(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
  if (!WIFEXITED(status) || WEXITSTATUS(status)) std::_Exit(1);
  return false;
}

void live_in_processes(Life& life, Dice& dice) {
  const bool kills = !dice.one_in(4);
  const pid_t server = child(life, [](Life& l, uint64_t) { serve(l); }, 0);
  const pid_t engine = child(life, drive, kills ? ~0ull : 1000 + dice.below(20'000));
  if (kills) {
    usleep(useconds_t(500 + dice.below(8'000)));
    kill(dice.one_in(2) ? server : engine, SIGKILL);
  }
  for (int left = 2; left; --left) {
    int status = 0;
    if (wait(&status) < 0) fail("a process was lost", 0, 0, 0);
    life.ledger->kills += was_killed(status);
    il_ring_mark(life.base, 0, kShut);  // what the end of a control stream does
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: ring_stress threads|processes MESSAGES SEED\n"), 2;
  const bool is_threads = !std::strcmp(argv[1], "threads");
  const uint64_t target = std::strtoull(argv[2], nullptr, 10);
  Dice dice{std::strtoull(argv[3], nullptr, 10) * 0x9e3779b97f4a7c15u + 1};
  auto* ledger = static_cast<Ledger*>(shared(sizeof(Ledger)));
  while (ledger->messages < target) {
    Life life = born(ledger, target, dice);
    is_threads ? live_in_threads(life, dice) : live_in_processes(life, dice);
    munmap(life.base, life.bytes);
  }
  const Ledger& l = *ledger;
  std::printf("{\"messages\": %llu, \"served\": %llu, \"stale\": %llu, \"refused\": %llu, \"plans\": %llu, \"quarantines\": %llu, "
              "\"closes\": %llu, \"kills\": %llu, \"lives\": %llu}\n",
              (unsigned long long)l.messages, (unsigned long long)l.served, (unsigned long long)l.stale,
              (unsigned long long)l.refused, (unsigned long long)l.plans, (unsigned long long)l.quarantines,
              (unsigned long long)l.closes, (unsigned long long)l.kills, (unsigned long long)l.lives);
  return 0;
}
