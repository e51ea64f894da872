#include "worker/executor/executor.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/executor/hazard_tracker.h"

namespace ringattn::worker {
namespace {

struct Started {
  int64_t step = 0;
  bool transfer = false;
  const char* name = "";
  EventRef event;
  KernelName kernel;
};

std::vector<PeerTransfer> BindTransfers(const Operation& operation, const Step& step,
                                        std::vector<Access>* accesses) {
  std::vector<PeerTransfer> group;
  for (const Transfer& transfer : step.transfers) {
    const bool receive = transfer.kind == Transfer::Kind::kReceive;
    accesses->push_back({transfer.range, receive});
    group.push_back({receive ? PeerTransfer::Kind::kReceive : PeerTransfer::Kind::kSend,
                     operation.members()[transfer.peer], operation.Address(transfer.range),
                     transfer.range.bytes});
  }
  return group;
}

// Returns whether one of the transfers uses compute units.
bool TakesComputeUnits(const Communicator& communicator, const std::vector<PeerTransfer>& group) {
  return std::any_of(group.begin(), group.end(), [&communicator](const PeerTransfer& transfer) {
    return communicator.takes_compute_units(transfer.peer);
  });
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

// Waits for the started items before `end`, beginning at *waited. Stores the first failure in
// program order in *failure; later failures follow from it.
void WaitUntil(size_t end, const std::vector<Started>& started, size_t* waited,
               absl::Status* failure, RunControl* control) {
  for (; *waited < end; ++*waited) {
    const Started& item = started[*waited];
    absl::Status status = item.event->Wait(absl::InfiniteFuture());
    if (!item.transfer) control->calls_done.fetch_add(1, std::memory_order_relaxed);
    if (status.ok() || !failure->ok()) continue;
    *failure = absl::Status(
        status.code(), absl::StrCat("step ", item.step, " ", item.name, ": ", status.message()));
    // The result is lost, so stop the kernels that are still enqueued.
    control->stop = true;
  }
}

// Returns how much of the transfers' time overlapped with compute calls. Calls are ordered, and so
// are transfer groups, so one merge pass suffices.
absl::Duration HiddenTime(const std::vector<Started>& started) {
  std::vector<const Event*> calls;
  for (const Started& item : started) {
    if (!item.transfer) calls.push_back(item.event.get());
  }
  absl::Duration hidden;
  size_t first = 0;  // the first call that may overlap the transfer
  for (const Started& item : started) {
    if (!item.transfer) continue;
    const absl::Time begin = item.event->begin_time();
    const absl::Time end = item.event->end_time();
    while (first < calls.size() && calls[first]->end_time() <= begin) ++first;
    for (size_t i = first; i < calls.size() && calls[i]->begin_time() < end; ++i) {
      hidden += std::min(end, calls[i]->end_time()) - std::max(begin, calls[i]->begin_time());
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
  for (const Started& item : started) {
    const absl::Time begin = item.event->begin_time();
    const absl::Time end = item.event->end_time();
    report.begin = std::min(report.begin, begin);
    report.end = std::max(report.end, end);
    if (item.transfer) {
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
           item.transfer ? TimelineBar::Kind::kExchange : TimelineBar::Kind::kCompute, begin, end,
           item.kernel});
    }
  }
  if (started.empty()) report.begin = report.end = MonotonicNow();
  report.hidden_exchange_time = HiddenTime(started);
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
  std::vector<Started> started;
  std::vector<size_t> end_of_step;
  size_t waited = 0;
  absl::Status failure;

  for (BufferId id = 0; id < static_cast<BufferId>(program.buffers.size()); ++id) {
    if (program.buffers[id].source != BufferSource::kUpload) continue;
    hazards.RecordInitial({id, 0, program.buffers[id].bytes}, options.uploads);
  }
  for (int64_t step = 0; step < static_cast<int64_t>(program.steps.size()); ++step) {
    const std::vector<ReadyCall>& calls = operation.ReadyCalls(step);
    size_t next_call = 0;
    const auto start_call = [&](const std::function<void()>& bring_keys = {}) {
      const ReadyCall& ready = calls[next_call++];
      StartAfter after(hazards.Dependencies(ready.accesses));
      if (bring_keys) {
        after.bring_keys = [&] {
          bring_keys();
          return hazards.Dependencies(ready.late_reads);
        };
      }
      EventRef done = device.Start(*ready.call, std::move(after), &control);
      hazards.Record(ready.accesses, done);
      started.push_back({step, false, ready.name, std::move(done), ready.call->kernel()});
    };
    // Every rank starts the exchange, even one without calls, because its peers depend on it.
    // The exchange is enqueued before the step's calls, so that both overlap. The first call
    // precedes it if no transfer uses compute units and the two do not conflict: the device then
    // starts at once. It must precede it if the kernel itself waits for keys that the exchange
    // brings.
    if (const Step& now = program.steps[step]; !now.transfers.empty()) {
      std::vector<Access> accesses;
      std::vector<PeerTransfer> group = BindTransfers(operation, now, &accesses);
      bool exchanged = false;
      const auto start_exchange = [&] {
        exchanged = true;
        EventRef done =
            communicator->Start(std::move(group), hazards.Dependencies(accesses), &control);
        hazards.Record(accesses, done);
        started.push_back({step, true, "exchange", std::move(done), {}});
      };
      if (!calls.empty() && !calls.front().late_reads.empty()) {
        start_call(start_exchange);
      } else if (!TakesComputeUnits(*communicator, group) && !calls.empty() &&
                 !Conflict(accesses, calls.front().accesses)) {
        start_call();
      }
      if (!exchanged) start_exchange();
    }
    while (next_call < calls.size()) start_call();
    // Waits only for the step `steps_ahead` before this one, so that the amount of enqueued work
    // stays bounded.
    end_of_step.push_back(started.size());
    if (step >= options.steps_ahead) {
      WaitUntil(end_of_step[step - options.steps_ahead], started, &waited, &failure, &control);
    }
    if (current_step != nullptr) current_step->store(step, std::memory_order_relaxed);
  }

  WaitUntil(started.size(), started, &waited, &failure, &control);
  if (!failure.ok()) return failure;
  if (control.stop.load()) return absl::CancelledError("the operation was stopped");
  ExecutionReport report = MakeReport(program, started, options.with_timeline);
  if (communicator != nullptr) report.sent_by_transport = SentBytes(operation, *communicator);
  return report;
}

}  // namespace ringattn::worker
