#include "common/plan/testing/timing_simulator.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "common/plan/cost_model.h"
#include "common/program/access.h"

namespace ringattn {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A call, or one rank's transfers of a step in one lane.
struct Task {
  double seconds = 0;         // of a call
  std::vector<int> waits_on;  // tasks of the same rank
  std::vector<int> flows;     // of a group of transfers
  bool is_group = false;
  bool started = false;
  double ends = kNever;
};

// One transfer between two ranks, and the tasks of both that contain it.
struct Flow {
  int sender = 0, receiver = 0;
  int sender_task = -1, receiver_task = -1;
  Lane lane = Lane::kInside;
  double bytes_left = 0;
  double begins = kNever;  // once both ranks have started it and the overhead has passed
  bool runs = false;
  bool ended = false;
};

class Simulation {
 public:
  Simulation(const AttentionSpec& spec, const std::vector<Program>& programs,
             const PlannerInputs& inputs, const std::vector<int>& host_of_rank)
      : spec_(spec), inputs_(inputs), host_of_rank_(host_of_rank), ranks_(programs.size()) {
    for (const Program& program : programs) AddTasks(program);
    for (const Flow& flow : flows_) {
      assert(flow.sender_task >= 0 && flow.receiver_task >= 0);
      (void)flow;
    }
  }

  SimulatedTimes Run() {
    while (true) {
      while (StartWhatCan()) {
      }
      const double next = NextEvent();
      if (next == kNever) break;
      Advance(next);
    }
    SimulatedTimes times;
    for (const std::vector<Task>& tasks : ranks_) {
      double& busy = times.busy_seconds.emplace_back();
      for (const Task& task : tasks) {
        assert(task.ends <= now_);
        busy += task.seconds;
        times.seconds = std::max(times.seconds, task.ends);
      }
    }
    return times;
  }

 private:
  void AddTasks(const Program& program) {
    std::vector<Task>& tasks = ranks_[program.rank];
    std::vector<std::vector<Access>> accesses;  // by task
    int last_call = -1;
    int last_group[kLanes] = {-1, -1};
    std::map<std::pair<int, bool>, int> of_pair;  // by peer and direction: transfers so far
    const auto add = [&](Task task, int previous, std::vector<Access> own) {
      for (size_t i = 0; i < tasks.size(); ++i) {
        if (static_cast<int>(i) == previous || Conflict(accesses[i], own)) {
          task.waits_on.push_back(static_cast<int>(i));
        }
      }
      tasks.push_back(std::move(task));
      accesses.push_back(std::move(own));
      return static_cast<int>(tasks.size()) - 1;
    };
    for (const Step& step : program.steps) {
      for (Lane lane : kAllLanes) {
        Task group;
        group.is_group = true;
        std::vector<Access> own;
        const int task = static_cast<int>(tasks.size());
        for (const Transfer& transfer : step.transfers) {
          if (transfer.lane != lane) continue;
          own.push_back(AccessOf(transfer));
          const bool sends = transfer.kind == Transfer::Kind::kSend;
          const int number = of_pair[{transfer.peer, sends}]++;
          group.flows.push_back(FlowOf(program.rank, transfer, number, task));
        }
        if (group.flows.empty()) continue;
        last_group[IndexOf(lane)] =
            add(std::move(group), last_group[IndexOf(lane)], std::move(own));
      }
      for (const ComputeCall& call : step.calls) {
        Task task;
        task.seconds =
            FlopsOfCall(spec_, call) / inputs_.device_flops_per_s + inputs_.step_overhead_s;
        last_call = add(std::move(task), last_call, AccessesOf(call));
      }
    }
  }

  // Returns the flow of a rank's side of a transfer, the `number`-th between both in its direction.
  int FlowOf(int rank, const Transfer& transfer, int number, int task) {
    const bool sends = transfer.kind == Transfer::Kind::kSend;
    const int sender = sends ? rank : transfer.peer;
    const int receiver = sends ? transfer.peer : rank;
    const auto [found, is_new] =
        flow_of_.try_emplace({sender, receiver, number}, static_cast<int>(flows_.size()));
    if (is_new) flows_.emplace_back();
    Flow& flow = flows_[found->second];
    flow.sender = sender;
    flow.receiver = receiver;
    (sends ? flow.sender_task : flow.receiver_task) = task;
    flow.lane = transfer.lane;
    flow.bytes_left = static_cast<double>(transfer.range.bytes);
    return found->second;
  }

  bool StartWhatCan() {
    bool any = false;
    for (std::vector<Task>& tasks : ranks_) {
      for (Task& task : tasks) {
        if (task.started) continue;
        const bool ready = std::all_of(task.waits_on.begin(), task.waits_on.end(),
                                       [&](int other) { return tasks[other].ends <= now_; });
        if (!ready) continue;
        task.started = any = true;
        if (!task.is_group) task.ends = now_ + task.seconds;
      }
    }
    for (Flow& flow : flows_) {
      if (flow.begins == kNever && ranks_[flow.sender][flow.sender_task].started &&
          ranks_[flow.receiver][flow.receiver_task].started) {
        flow.begins = now_ + (flow.lane == Lane::kBetween ? inputs_.host_exchange_overhead_s
                                                          : inputs_.exchange_overhead_s);
      }
      flow.runs = !flow.ended && flow.begins <= now_;
    }
    return any;
  }

  // Returns the bytes per second of each running flow: its smallest share of a port. Ports are
  // those of both ranks, and between hosts also those of both hosts.
  std::vector<double> Rates() const {
    std::map<std::tuple<Lane, int, bool>, int> of_rank;  // flows by lane, rank and direction
    std::map<std::pair<int, bool>, int> of_host;
    for (const Flow& flow : flows_) {
      if (!flow.runs) continue;
      for (bool sends : {true, false}) {
        const int rank = sends ? flow.sender : flow.receiver;
        ++of_rank[{flow.lane, rank, sends}];
        if (flow.lane == Lane::kBetween) ++of_host[{host_of_rank_[rank], sends}];
      }
    }
    std::vector<double> rates;
    for (const Flow& flow : flows_) {
      const bool between = flow.lane == Lane::kBetween;
      double& rate = rates.emplace_back(flow.runs ? kNever : 0);
      for (bool sends : {true, false}) {
        if (!flow.runs) break;
        const int rank = sends ? flow.sender : flow.receiver;
        rate = std::min(rate, (between ? inputs_.host_link_bytes_per_s : inputs_.link_bytes_per_s) /
                                  of_rank[{flow.lane, rank, sends}]);
        if (!between) continue;
        rate = std::min(rate, inputs_.HostBytesPerSecond() / of_host[{host_of_rank_[rank], sends}]);
      }
    }
    return rates;
  }

  double NextEvent() {
    rates_ = Rates();
    double next = kNever;
    for (size_t i = 0; i < flows_.size(); ++i) {
      const Flow& flow = flows_[i];
      if (flow.runs) next = std::min(next, now_ + flow.bytes_left / rates_[i]);
      if (!flow.runs && !flow.ended) next = std::min(next, flow.begins);
    }
    for (const std::vector<Task>& tasks : ranks_) {
      for (const Task& task : tasks) {
        if (!task.is_group && task.started && task.ends > now_) next = std::min(next, task.ends);
      }
    }
    return next;
  }

  void Advance(double next) {
    for (size_t i = 0; i < flows_.size(); ++i) {
      Flow& flow = flows_[i];
      if (!flow.runs) continue;
      const double ends = now_ + flow.bytes_left / rates_[i];
      flow.bytes_left -= (next - now_) * rates_[i];
      if (ends <= next) flow.ended = true;
    }
    now_ = next;
    for (std::vector<Task>& tasks : ranks_) {
      for (Task& task : tasks) {
        if (!task.is_group || !task.started || task.ends <= now_) continue;
        const bool ended = std::all_of(task.flows.begin(), task.flows.end(),
                                       [&](int flow) { return flows_[flow].ended; });
        if (ended) task.ends = now_;
      }
    }
  }

  const AttentionSpec& spec_;
  const PlannerInputs& inputs_;
  const std::vector<int>& host_of_rank_;
  std::vector<std::vector<Task>> ranks_;
  std::vector<Flow> flows_;
  std::map<std::tuple<int, int, int>, int> flow_of_;
  std::vector<double> rates_;
  double now_ = 0;
};

}  // namespace

double SimulatedTimes::exposed_seconds() const {
  return seconds - *std::max_element(busy_seconds.begin(), busy_seconds.end());
}

SimulatedTimes SimulateTimes(const AttentionSpec& spec, const std::vector<Program>& programs,
                             const PlannerInputs& inputs, const std::vector<int>& host_of_rank) {
  return Simulation(spec, programs, inputs, host_of_rank).Run();
}

}  // namespace ringattn
