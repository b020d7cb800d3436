// The engine's end: sends site calls, cut into chunks, and takes their answers.
#pragma once

#include "bells.h"
#include "rows.h"

namespace {

enum Chunk : uint8_t { kDone = 0, kOutstanding = 1, kAbandoned = 2 };

struct Engine;

struct Ticket {  // a site call of one shape, cut into chunks; sent again and again, once at a time. As Block in ring.py
  FrameHeader header;  // step_id, layer and trace are those of the call under way
  Engine* engine;
  uint64_t x_stride, x_row;     // bytes from row to row; bytes of a row
  uint64_t ids_stride, weights_stride, topk_row;
  uint64_t rows, chunk_rows;
  int64_t out_stride;
  uint32_t out_dtype, chunks;
  uint64_t x, ids, weights, first;  // from here on: of the call under way
  int64_t sent_ns;
  int64_t waited_ns;                // inside `collect`, for chunks that were not there yet
  int64_t began_ns, ended_ns;       // when the server computed: from its first chunk to its last
  uint64_t refusal;                 // where in the file the frame that says no lies
  uint32_t sent, received;
};

struct Engine : Rings {    // begins as zeros
  uint64_t written;        // request frames written, plans included
  uint64_t next;           // the sequence the next ticket's first chunk gets
  uint64_t sent;           // chunks [0, sent) are in the ring or answered; sent <= next
  uint64_t oldest;         // chunks [0, oldest) have given their reply buffer back
  uint64_t stale;          // replies dropped: nobody waits for them any more
  uint8_t trace[24];       // of the step that the latest plan began
  uint8_t state[];         // of chunk s at [s % n], for s in [oldest, sent)

  bool arrived(uint64_t s) const { return load(&reply(s)->word) == s + 1; }
  bool has_room() const { return written - load(&file->consumed) < n; }

  bool has_credit() {
    for (; oldest < sent; ++oldest) {
      const uint8_t is = state[oldest % n];
      if (is == kOutstanding || (is == kAbandoned && !arrived(oldest))) break;
      stale += is == kAbandoned;
      state[oldest % n] = kDone;
    }
    return sent - oldest < n;
  }

  bool can_send(const Ticket& t) { return t.sent < t.chunks && t.first + t.sent == sent && has_room() && has_credit(); }

  void publish(FrameHeader* frame) { store(&frame->word, ++written); }

  void send_chunk(Ticket& t) {
    const uint64_t row0 = uint64_t(t.sent) * t.chunk_rows;
    const uint64_t rows = t.rows - row0 < t.chunk_rows ? t.rows - row0 : t.chunk_rows;
    FrameHeader* frame = request(written);
    char* body = payload(frame);
    uint64_t bytes = rows * t.x_row;
    copy_rows(body, t.x, t.x_stride, t.x_row, row0, rows);
    if (t.ids) {
      bytes = aligned(bytes);
      copy_rows(body + bytes, t.ids, t.ids_stride, t.topk_row, row0, rows);
      bytes += rows * t.topk_row;
    }
    if (t.weights) {
      copy_rows(body + bytes, t.weights, t.weights_stride, t.topk_row, row0, rows);
      bytes += rows * t.topk_row;
    }
    std::memcpy(&frame->kind, &t.header.kind, sizeof(FrameHeader) - sizeof(frame->word));
    frame->sequence = sent;
    frame->row_start = uint32_t(t.header.row_start + row0);
    frame->rows = uint32_t(rows);
    if (t.sent + 1 == t.chunks) frame->flags |= kLast;
    frame->payload_bytes = bytes;
    state[sent % n] = kOutstanding;
    ++sent;
    ++t.sent;
    publish(frame);
    wake_behind_next_job(file->server);
  }

  void pump(Ticket& t) {
    while (can_send(t)) send_chunk(t);
  }

  void submit(Ticket& t, uint64_t step_id, uint32_t layer, uint64_t x, uint64_t ids, uint64_t weights) {
    t.sent_ns = now_ns();
    t.header.step_id = step_id;
    t.header.layer = layer;
    if (!(t.header.flags & kHasRuns)) std::memcpy(t.header.trace, trace, sizeof(trace));
    t.x = x;
    t.ids = ids;
    t.weights = weights;
    t.sent = t.received = 0;
    t.waited_ns = 0;
    t.first = next;
    next += t.chunks;
    pump(t);
  }

  void abandon() {
    for (uint64_t s = oldest; s < sent; ++s)
      if (state[s % n] == kOutstanding) state[s % n] = kAbandoned;
    next = sent;  // what was not sent never will be
    has_credit();
  }

  Status take(Ticket& t, uint64_t s, const Target& to) {
    FrameHeader* frame = reply(s);
    const uint64_t row0 = uint64_t(t.received) * t.chunk_rows;
    const uint64_t rows = t.rows - row0 < t.chunk_rows ? t.rows - row0 : t.chunk_rows;
    if (frame->step_id != t.header.step_id || frame->sequence != s || frame->payload_bytes > capacity) return kCorrupt;
    if (frame->kind == kError) {
      t.refusal = uint64_t(reinterpret_cast<char*>(frame) - base);
      return kRefused;
    }
    const uint64_t cols = t.header.out_cols;
    if (frame->kind != kReply || frame->rows != rows || frame->payload_bytes != rows * cols * width(t.header.dtype))
      return kCorrupt;
    if (t.received == 0) t.began_ns = frame->began_ns;
    t.ended_ns = frame->ended_ns;
    take_rows(payload(frame), t.header.dtype, to, row0, rows, cols);
    return kOk;
  }

  Status collect(Ticket& t, const Target& to, int64_t deadline) {
    while (t.received < t.chunks) {
      pump(t);
      if (t.received == t.sent && t.first + t.sent != sent) return kBlocked;  // an earlier ticket must be collected first
      const uint64_t s = t.first + t.received;
      const auto ready = [&] { return (t.received < t.sent && arrived(s)) || can_send(t); };
      if (!ready()) {
        il::wake_owed();
        const int64_t from = now_ns();
        const Status status = await(*this, file->engine, file->server, deadline, ready);
        t.waited_ns += now_ns() - from;
        if (status != kOk) return status;
      }
      if (t.received == t.sent || !arrived(s)) continue;
      const Status taken = take(t, s, to);
      state[s % n] = kDone;
      ++t.received;
      if (taken != kOk) return taken;
    }
    return kOk;
  }
};

}  // namespace
