// The time that the coordinator's core takes for small requests, without gRPC: from the arrival to
// Reserve, and from the worker's answer to the end.
//
//   bazel run //tests/bench:core_rate -- --requests=200000 --in_flight=1,8,64
//
// One worker serves all requests as inline operations (worker_control.proto). Every request must
// succeed with the worker's outputs, and the program ends with status 1 otherwise. Prints CSV, in
// microseconds per request.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/plan/planner.h"
#include "server/core/coordinator.h"
#include "server/core/requests/plan_summary.h"

ABSL_FLAG(int, requests, 100'000, "Requests of each level");
ABSL_FLAG(std::vector<std::string>, in_flight, std::vector<std::string>({"1", "8", "64"}),
          "Requests in flight at the same time, a level each");
ABSL_FLAG(int, tokens, 16, "Tokens of a request with one head of 64");

namespace ringattn::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr ConnectionId kWorker = 1;

[[noreturn]] void Fail(const std::string& why) {
  std::cerr << "core_rate: " << why << "\n";
  std::exit(1);
}

// One coordinator, its worker and its client.
class Service {
 public:
  explicit Service(int tokens) : core_(Config()) {
    spec_.dtype = DType::kBFloat16;
    spec_.shape.seq_len_q = spec_.shape.seq_len_kv = tokens;
    spec_.shape.cu_seqlens_q = spec_.shape.cu_seqlens_k = {0, tokens};
    inputs_ = std::make_shared<const InlineTensors>(
        InlineTensors{{TensorId::kQ, std::string(tokens * 128, 'q')},
                      {TensorId::kK, std::string(tokens * 128, 'k')},
                      {TensorId::kV, std::string(tokens * 128, 'v')}});
    WorkerJoined joined;
    joined.connection = kWorker;
    joined.registration.set_name("worker-0");
    joined.registration.set_incarnation("1");
    joined.registration.set_version("0.1.0");
    joined.registration.set_memory_bytes(int64_t{8} << 30);
    joined.registration.set_runs_inline(true);
    Handle(std::move(joined));
    for (int tick = 0; tick < 1000 && core_.stats().ready_workers == 0; ++tick) {
      now_ += Config().tick_interval;
      Handle(Tick{});
    }
    if (core_.stats().ready_workers != 1) Fail("the ring did not form");
  }

  // Serves `requests`, of which `in_flight` at a time.
  void Serve(int requests, int in_flight) {
    arrival_ = answer_ = {};
    const int64_t end = served_ + requests;
    int64_t arrived = served_;
    while (served_ < end) {
      for (; arrived < end && arrived - served_ < in_flight; ++arrived) {
        RequestArrived event = NextRequest();
        arrival_ += Timed([&] { Handle(std::move(event)); });
      }
      if (reserves_.empty()) Fail("a request was not sent to the worker");
      WorkerMessage event = AnswerOf(reserves_.front());
      reserves_.pop_front();
      answer_ += Timed([&] { Handle(std::move(event)); });
      now_ += absl::Microseconds(100);
    }
    std::printf("%d,%d,%.2f,%.2f\n", in_flight, requests, arrival_.count() * 1e6 / requests,
                answer_.count() * 1e6 / requests);
  }

 private:
  using Seconds = std::chrono::duration<double>;

  static CoordinatorConfig Config() { return CoordinatorConfig(); }

  template <typename Work>
  static Seconds Timed(Work work) {
    const auto begin = Clock::now();
    work();
    return Clock::now() - begin;
  }

  RequestArrived NextRequest() {
    RequestArrived event;
    event.stream = ++last_stream_;
    event.client = "127.0.0.1:40000";
    event.request_id = absl::StrCat("request-with-an-id-of-36-letters-", last_stream_);
    event.fingerprint = event.stream;
    event.recipe_fingerprint = 1;
    event.spec = spec_;
    event.deadline = now_ + absl::Minutes(1);
    event.inline_inputs = inputs_;
    return event;
  }

  static WorkerMessage AnswerOf(const v1::Reserve& reserve) {
    WorkerMessage event;
    event.connection = kWorker;
    v1::Finished& finished = *event.message.mutable_finished();
    finished.set_operation_id(reserve.operation_id());
    finished.set_generation(reserve.generation());
    finished.set_ok(true);
    finished.mutable_reserved()->set_ok(true);
    v1::TensorChunk* out = finished.add_outputs();
    out->set_tensor(v1::TENSOR_ID_OUT);
    out->set_data(reserve.inline_run().inputs(0).data());
    return event;
  }

  // Handles the event and the plans that it requests, as CoreLoop does with a cached plan.
  void Handle(Event event) {
    std::deque<Event> events;
    events.push_back(std::move(event));
    while (!events.empty()) {
      std::vector<Action> actions = core_.Handle(std::move(events.front()), now_);
      events.pop_front();
      for (Action& action : actions) {
        std::visit([&](auto& each) { CarryOut(each, &events); }, action);
      }
    }
  }

  void CarryOut(PlanThis& ask, std::deque<Event>* events) {
    if (plan_ == nullptr || plan_generation_ != ask.generation) {
      absl::StatusOr<Plan> plan = PlanRequest(*ask.spec, ask.direction, ask.choice, ask.inputs);
      if (!plan.ok()) Fail(plan.status().ToString());
      plan_ = std::make_shared<const Plan>(WithoutSpans(*std::move(plan)));
      plan_generation_ = ask.generation;
    }
    events->push_back(Planned{ask.stream, ask.generation, plan_});
  }
  void CarryOut(SendToWorker& send, std::deque<Event>* events) {
    v1::JoinRequest answer;
    if (send.message.has_prepare()) {
      answer.mutable_prepared()->set_generation(send.message.prepare().generation());
    } else if (send.message.has_commit()) {
      answer.mutable_committed()->set_generation(send.message.commit().generation());
    } else if (send.message.has_reserve()) {
      if (!send.message.reserve().has_inline_run()) Fail("an operation is not inline");
      return reserves_.push_back(std::move(*send.message.mutable_reserve()));
    } else {
      return;
    }
    events->push_back(WorkerMessage{kWorker, std::move(answer)});
  }
  void CarryOut(BeginDownload& begin, std::deque<Event>*) {
    if (begin.outputs.size() != 1 || begin.outputs[0].data() != (*inputs_)[0].bytes) {
      Fail("a request has not got its outputs");
    }
  }
  void CarryOut(FinishRequest&, std::deque<Event>*) { ++served_; }
  void CarryOut(FailRequest& fail, std::deque<Event>*) { Fail(fail.failure.message); }
  void CarryOut(DropWorker& drop, std::deque<Event>*) { Fail(drop.reason); }
  template <typename Other>
  void CarryOut(Other&, std::deque<Event>*) {}

  Coordinator core_;
  absl::Time now_ = absl::UnixEpoch();
  AttentionSpec spec_;
  std::shared_ptr<const InlineTensors> inputs_;
  std::shared_ptr<const Plan> plan_;
  uint64_t plan_generation_ = 0;
  std::deque<v1::Reserve> reserves_;  // not answered yet
  StreamId last_stream_ = 0;
  int64_t served_ = 0;
  Seconds arrival_{}, answer_{};
};

}  // namespace
}  // namespace ringattn::server

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  ringattn::server::Service service(absl::GetFlag(FLAGS_tokens));
  std::printf("in_flight,requests,arrival_us,answer_us\n");
  for (const std::string& text : absl::GetFlag(FLAGS_in_flight)) {
    int in_flight = 0;
    if (!absl::SimpleAtoi(text, &in_flight) || in_flight < 1) {
      ringattn::server::Fail(absl::StrCat("--in_flight: \"", text, "\" is not a positive number"));
    }
    service.Serve(absl::GetFlag(FLAGS_requests), in_flight);
  }
}
