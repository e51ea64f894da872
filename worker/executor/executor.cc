#include "worker/executor/executor.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/program/access.h"
#include "common/program/lane.h"
#include "worker/executor/hazard_tracker.h"

namespace ringattn::worker {
namespace {

struct Started {
  int64_t step = 0;
  std::optional<Lane> lane;  // of a group of transfers; nullopt: a call
  const char* name = "";
  EventRef event;
  KernelName kernel;

  bool transfer() const { return lane.has_value(); }
};

struct Interval {
  absl::Time begin;
  absl::Time end;
};

// Returns when the calls ran, in their order. A call that overlaps the one before it counts from
// that one's end, so that no time counts twice.
std::vector<Interval> CallTimes(const std::vector<Started>& started) {
  std::vector<Interval> times;
  for (const Started& item : started) {
    if (item.transfer()) continue;
    const absl::Time free = times.empty() ? absl::InfinitePast() : times.back().end;
    const absl::Time begin = std::max(item.event->begin_time(), free);
    times.push_back({begin, std::max(item.event->end_time(), begin)});
  }
  return times;
}

// A step's transfers of one lane.
struct LaneGroup {
  Lane lane = Lane::kInside;
  std::vector<PeerTransfer> transfers;
  std::vector<Access> accesses;
  bool takes_compute_units = false;  // one of the transfers does
  bool started = false;
};

// Returns the step's groups in the order in which to start them, without empty ones. Transfers
// between hosts come first, because they take longer. Without lanes, all transfers are one group.
std::vector<LaneGroup> BindTransfers(const Operation& operation, const Communicator& communicator,
                                     const Step& step) {
  std::vector<LaneGroup> groups;
  for (Lane lane : {Lane::kBetween, Lane::kInside}) {
    LaneGroup group{.lane = lane};
    for (const Transfer& transfer : step.transfers) {
      const Lane in = communicator.has_lanes() ? transfer.lane : Lane::kInside;
      if (in != lane) continue;
      const bool receive = transfer.kind == Transfer::Kind::kReceive;
      const int peer = operation.members()[transfer.peer];
      group.accesses.push_back(AccessOf(transfer));
      group.transfers.push_back({receive ? PeerTransfer::Kind::kReceive : PeerTransfer::Kind::kSend,
                                 peer, operation.Address(transfer.range), transfer.range.bytes});
      group.takes_compute_units |= communicator.takes_compute_units(peer);
    }
    if (!group.transfers.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

// Returns the first step after `step` that must wait for the group, because a transfer or a call
// there reads what it receives or writes what it sends; the last step if there is none.
int64_t FirstDependent(const Operation& operation, int64_t step, const LaneGroup& group) {
  const std::vector<Step>& steps = operation.program().steps;
  const int64_t last = static_cast<int64_t>(steps.size()) - 1;
  for (int64_t later = step + 1; later < last; ++later) {
    for (const Transfer& transfer : steps[later].transfers) {
      if (Conflict(group.accesses, {AccessOf(transfer)})) return later;
    }
    for (const ReadyCall& call : operation.ReadyCalls(later)) {
      if (Conflict(group.accesses, call.accesses)) return later;
    }
  }
  return last;
}

// Returns the bytes that the operation sends, by what carries them.
std::map<std::string, int64_t> SentBytes(const Operation& operation,
                                         const Communicator& communicator) {
  std::map<std::string, int64_t> sent;
  for (const Step& step : operation.program().steps) {
    for (const Transfer& transfer : step.transfers) {
      if (transfer.kind != Transfer::Kind::kSend || transfer.range.bytes == 0) continue;
      sent[communicator.transport(operation.members()[transfer.peer])] += transfer.range.bytes;
    }
  }
  return sent;
}

// The started items, and how far this thread has waited for them.
class StartedItems {
 public:
  StartedItems(int64_t steps, RunControl* control) : control_(*control), due_(steps) {}

  // `due`: the step with which WaitForStep waits for the item.
  void Add(Started item, int64_t due) {
    due_[due].push_back(items_.size());
    items_.push_back(std::move(item));
  }

  // Waits for the items that are due at the step. REQUIRES: it has waited for the steps before.
  void WaitForStep(int64_t step) {
    for (size_t index : due_[step]) {
      const Started& item = items_[index];
      absl::Status status =
          control_.polls ? PollAndWait(*item.event) : item.event->Wait(absl::InfiniteFuture());
      if (!item.transfer()) control_.calls_done.fetch_add(1, std::memory_order_relaxed);
      if (status.ok() || (failed_.has_value() && *failed_ < index)) continue;
      failed_ = index;
      failure_ = absl::Status(
          status.code(), absl::StrCat("step ", item.step, " ", item.name, ": ", status.message()));
      // The result is lost, so stop the kernels that are still enqueued.
      control_.stop = true;
    }
  }

  const std::vector<Started>& all() const { return items_; }
  // The first failure in program order among the items waited for; later failures follow from it.
  const absl::Status& failure() const { return failure_; }

 private:
  RunControl& control_;
  std::vector<Started> items_;  // in program order
  std::vector<std::vector<size_t>> due_;
  std::optional<size_t> failed_;
  absl::Status failure_;
};

// Returns how much of the lane's transfer time overlapped with compute calls. Calls are ordered,
// and so are the groups of a lane, so one merge pass suffices.
absl::Duration HiddenTime(const std::vector<Started>& started, Lane lane) {
  const std::vector<Interval> calls = CallTimes(started);
  absl::Duration hidden;
  size_t first = 0;  // the first call that may overlap the transfer
  for (const Started& item : started) {
    if (item.lane != lane) continue;
    const absl::Time begin = item.event->begin_time();
    const absl::Time end = item.event->end_time();
    while (first < calls.size() && calls[first].end <= begin) ++first;
    for (size_t i = first; i < calls.size() && calls[i].begin < end; ++i) {
      hidden += std::min(end, calls[i].end) - std::max(begin, calls[i].begin);
    }
  }
  return hidden;
}

std::vector<KernelUse> KernelsOf(const std::vector<Started>& started) {
  std::vector<KernelUse> uses;
  for (const Started& item : started) {
    if (item.kernel.empty()) continue;
    auto use = std::find_if(uses.begin(), uses.end(), [&item](const KernelUse& each) {
      return each.kernel == item.kernel && std::string_view(each.call) == item.name;
    });
    if (use == uses.end()) use = uses.insert(uses.end(), {item.name, item.kernel, 0});
    ++use->calls;
  }
  return uses;
}

ExecutionReport MakeReport(const Program& program, const std::vector<Started>& started,
                           bool with_timeline) {
  ExecutionReport report;
  report.begin = absl::InfiniteFuture();
  report.end = absl::InfinitePast();
  std::optional<absl::Time> device_free;
  const std::vector<Interval> calls = CallTimes(started);
  size_t next_call = 0;
  for (const Started& item : started) {
    const auto [begin, end] = item.transfer()
                                  ? Interval{item.event->begin_time(), item.event->end_time()}
                                  : calls[next_call++];
    report.begin = std::min(report.begin, begin);
    report.end = std::max(report.end, end);
    if (item.transfer()) {
      report.exchange_time += end - begin;
    } else {
      report.compute_time += end - begin;
      if (device_free.has_value() && begin > *device_free) {
        report.ring_wait_time += begin - *device_free;
        if (with_timeline) {
          report.timeline.push_back({absl::StrCat("step ", item.step, " wait"),
                                     TimelineBar::Kind::kWait,
                                     *device_free,
                                     begin,
                                     {}});
        }
      }
      device_free = end;
    }
    if (with_timeline) {
      report.timeline.push_back(
          {absl::StrCat("step ", item.step, " ", item.name),
           item.transfer() ? TimelineBar::Kind::kExchange : TimelineBar::Kind::kCompute, begin, end,
           item.kernel});
    }
  }
  if (started.empty()) report.begin = report.end = MonotonicNow();
  for (Lane lane : kAllLanes) report.hidden_exchange_time += HiddenTime(started, lane);
  report.sent_bytes = program.SentBytes();
  report.tiles = program.TileCount();
  report.kernels = KernelsOf(started);
  return report;
}

}  // namespace

absl::StatusOr<ExecutionReport> Execute(Operation& operation, Device& device,
                                        Communicator* communicator, const ExecuteOptions& options,
                                        std::atomic<int64_t>* current_step) {
  const Program& program = operation.program();
  RunControl& control = operation.control();
  HazardTracker hazards;
  const int64_t steps = static_cast<int64_t>(program.steps.size());
  StartedItems started(steps, &control);

  for (BufferId id = 0; id < static_cast<BufferId>(program.buffers.size()); ++id) {
    if (program.buffers[id].source != BufferSource::kUpload) continue;
    hazards.RecordInitial({id, 0, program.buffers[id].bytes}, options.uploads);
  }
  int64_t exchanged_until = 0;  // the exchange of earlier steps has started
  EventRef last_call;
  for (int64_t step = 0; step < steps; ++step) {
    const std::vector<ReadyCall>& calls = operation.ReadyCalls(step);
    size_t next_call = 0;
    const auto start_call = [&](const std::function<void()>& bring_keys = {}) {
      const ReadyCall& ready = calls[next_call++];
      StartAfter after(hazards.Dependencies(ready.accesses));
      if (ready.overlaps_previous) {
        after.overlaps_previous = true;
        after.all.erase(std::remove(after.all.begin(), after.all.end(), last_call),
                        after.all.end());
      }
      if (bring_keys) {
        after.bring_keys = [&] {
          bring_keys();
          std::vector<std::vector<EventRef>> arrivals;
          for (const std::vector<Access>& reads : ready.late_reads) {
            arrivals.push_back(hazards.Dependencies(reads));
          }
          return arrivals;
        };
      }
      EventRef done = device.Start(*ready.call, std::move(after), &control);
      hazards.Record(ready.accesses, done);
      last_call = done;
      // A call with late keys does the work of the steps that bring them, and this thread must not
      // wait for it before it has enqueued what follows those.
      const int64_t due = std::min(step + static_cast<int64_t>(ready.late_reads.size()), steps - 1);
      started.Add({step, std::nullopt, ready.name, std::move(done), ready.call->kernel()}, due);
    };
    // Every rank starts the exchange, even one without calls, because its peers depend on it.
    // The exchange is enqueued before the step's calls, so that both overlap. The first call
    // precedes a lane's group if none of its transfers uses compute units and the two do not
    // conflict: the device then starts at once. It must precede the groups if the kernel itself
    // waits for keys that they bring; no group of such a step uses compute units. Such a call's
    // keys may come in several steps, whose groups then start with the call.
    const auto start_group = [&](int64_t of, LaneGroup& group) {
      group.started = true;
      // This thread waits for a group between hosts only with the step that depends on it.
      const bool may_last = group.lane == Lane::kBetween;
      const int64_t due = may_last ? FirstDependent(operation, of, group) : of;
      EventRef done = communicator->StartInLane(group.lane, std::move(group.transfers),
                                                hazards.Dependencies(group.accesses), &control);
      hazards.Record(group.accesses, done);
      started.Add(
          {of, group.lane, may_last ? "exchange between hosts" : "exchange", std::move(done), {}},
          due);
    };
    const auto start_step = [&](int64_t of, std::vector<LaneGroup>& groups) {
      for (LaneGroup& group : groups) {
        if (!group.started) start_group(of, group);
      }
    };
    if (!calls.empty() && !calls.front().late_reads.empty()) {
      const int64_t end = step + static_cast<int64_t>(calls.front().late_reads.size());
      start_call([&] {
        for (int64_t of = step; of < end; ++of) {
          std::vector<LaneGroup> groups =
              BindTransfers(operation, *communicator, program.steps[of]);
          start_step(of, groups);
        }
      });
      exchanged_until = end;
    } else if (!program.steps[step].transfers.empty() && step >= exchanged_until) {
      std::vector<LaneGroup> groups = BindTransfers(operation, *communicator, program.steps[step]);
      if (!calls.empty()) {
        const auto precedes = [&calls](const LaneGroup& group) {
          return group.takes_compute_units || Conflict(group.accesses, calls.front().accesses);
        };
        for (LaneGroup& group : groups) {
          if (precedes(group)) start_group(step, group);
        }
        const bool any_left = std::any_of(groups.begin(), groups.end(),
                                          [](const LaneGroup& group) { return !group.started; });
        if (any_left) start_call();
      }
      start_step(step, groups);
    }
    while (next_call < calls.size()) start_call();
    // Waits only for the step `steps_ahead` before this one, so that the amount of enqueued work
    // stays bounded.
    if (step >= options.steps_ahead) started.WaitForStep(step - options.steps_ahead);
    if (current_step != nullptr) current_step->store(step, std::memory_order_relaxed);
  }

  for (int64_t step = std::max<int64_t>(steps - options.steps_ahead, 0); step < steps; ++step) {
    started.WaitForStep(step);
  }
  if (!started.failure().ok()) return started.failure();
  if (control.stop.load()) return absl::CancelledError("the operation was stopped");
  ExecutionReport report = MakeReport(program, started.all(), options.with_timeline);
  if (communicator != nullptr) report.sent_by_transport = SentBytes(operation, *communicator);
  return report;
}

}  // namespace ringattn::worker
