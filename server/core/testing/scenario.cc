#include "server/core/testing/scenario.h"

#include <cstdlib>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/core/requests/plan_summary.h"
#include "server/core/testing/scenario_views.h"
#include "server/core/testing/scenario_words.h"

namespace ringattn::server {
namespace {

AttentionSpec SpecOf(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.seq_len_q = tokens;
  spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = {0, tokens};
  spec.shape.cu_seqlens_k = {0, tokens};
  return spec;
}

class Scenario {
 public:
  explicit Scenario(const CoordinatorConfig& config) : config_(config), core_(config) {}

  std::string Run(const std::string& script) {
    for (absl::string_view line : absl::StrSplit(script, '\n')) {
      const absl::string_view text = absl::StripAsciiWhitespace(line);
      if (absl::StartsWith(text, ">")) continue;
      absl::StrAppend(&output_, line, "\n");
      const absl::string_view command = absl::StripAsciiWhitespace(text.substr(0, text.find('#')));
      if (command.empty()) continue;
      Execute(absl::StrSplit(command, ' ', absl::SkipEmpty()));
      Flush();
    }
    output_.pop_back();  // the newline after the last line
    return output_;
  }

 private:
  struct Worker {
    ConnectionId connection = 0;
    bool manual = false;
    bool silent = false;
    v1::Heartbeat heartbeat;
  };

  void Execute(const Words& words) {
    const std::string& verb = words[0];
    if (workers_.count(verb) > 0) return WorkerSays(verb, words);
    if (verb == "join") return Join(words);
    if (verb == "gone") return Feed(WorkerGone{Remove(words[1])});
    if (verb == "ring") return FormRing(words);
    if (verb == "manual" || verb == "silent") {
      for (size_t i = 1; i < words.size(); ++i) {
        (verb == "manual" ? workers_[words[i]].manual : workers_[words[i]].silent) = true;
      }
      return;
    }
    if (verb == "request") return Request(words);
    if (verb == "accepted") return Serve(words, /*run=*/false);
    if (verb == "running") return Serve(words, /*run=*/true);
    if (verb == "upload") return Feed(UploadProgressed{Stream(words[1])});
    if (verb == "download") return Feed(DownloadProgressed{Stream(words[1])});
    if (verb == "stands") {
      MembersStalled event{Stream(words[1]), {}};
      for (size_t i = 2; i < words.size(); ++i) {
        event.members.push_back(std::atoi(words[i].c_str()));
      }
      return Feed(event);
    }
    if (verb == "downloaded") return Feed(DownloadFinished{Stream(words[1])});
    if (verb == "share" || verb == "unshare") return Share(words);
    if (verb == "end") {
      Failure why;
      why.code = absl::StatusCode::kCancelled;
      why.reason = "CLIENT_CANCELLED";
      return Feed(RequestEnded{Stream(words[1]), why});
    }
    if (verb == "shard") {
      return Feed(ShardStreamFailed{Stream(words[1]), std::atoi(words[2].c_str()), Rest(words, 3)});
    }
    if (verb == "cancel") return Feed(CancelRequested{words[1], Option(words, "principal", "")});
    if (verb == "hold" && words.back() == "plans") {
      holds_plans_ = true;
      return;
    }
    if (verb == "planned") return Feed(Answer(held_plans_.at(Stream(words[1]))));
    if (verb == "unplanned") {
      Planned answer = Answer(held_plans_.at(Stream(words[1])));
      answer.plan = words[2] == "late" ? absl::DeadlineExceededError("planning takes longer")
                                       : absl::ResourceExhaustedError("too many wait");
      return Feed(answer);
    }
    if (verb == "delete") {
      return Feed(ResidualDeleted{words[1], Option(words, "principal", "")});
    }
    if (verb == "renew") {
      return Feed(ResidualsRenewed{{words[1]}, Option(words, "principal", ""), Duration(words[2])});
    }
    if (verb == "drain" || verb == "undrain") return Feed(DrainRequested{verb == "undrain"});
    if (verb == "reform") return Feed(ReformRequested{});
    if (verb == "wait") return Wait(Duration(words[1]));
    if (verb == "pause") {
      now_ += Duration(words[1]);
      return Feed(Tick{});
    }
    if (IsQuestion(verb)) return Show(AnswerOf(core_, words, {published_, losses_told_}));
    lines_.push_back({"", absl::StrCat("unknown command ", verb)});
  }

  void Show(const ScenarioLines& lines) { lines_.insert(lines_.end(), lines.begin(), lines.end()); }

  StreamId Stream(const std::string& name) {
    const auto [found, added] = streams_.emplace(name, streams_.size() + 1);
    return found->second;
  }

  std::string StreamName(StreamId stream) const {
    for (const auto& [name, id] : streams_) {
      if (id == stream) return name;
    }
    return "?";
  }

  std::string WorkerName(ConnectionId connection) const {
    const auto found = names_.find(connection);
    return found == names_.end() ? "?" : found->second;
  }

  void Join(const Words& words) {
    WorkerJoined joined;
    joined.connection = ++last_connection_;
    joined.registration = RegistrationOf(words);
    joined.registration.set_incarnation(absl::StrCat(last_connection_));
    workers_[words[1]] = {};
    workers_[words[1]].connection = joined.connection;
    names_[joined.connection] = words[1];
    Feed(joined);
  }

  void FormRing(const Words& words) {
    for (size_t i = 1; i < words.size(); ++i) Join({"join", words[i]});
    Wait(2 * config_.forming_delay);
    lines_.clear();
  }

  ConnectionId Remove(const std::string& name) {
    const ConnectionId connection = workers_.at(name).connection;
    workers_.erase(name);
    return connection;
  }

  void Say(const std::string& name, v1::JoinRequest message) {
    Feed(WorkerMessage{workers_.at(name).connection, std::move(message)});
  }

  void WorkerSays(const std::string& name, const Words& words) {
    v1::Heartbeat& heartbeat = workers_.at(name).heartbeat;
    if (words[1] == "at") return SetPosition(words, &heartbeat);
    std::optional<v1::JoinRequest> message = MessageOf(name, words, heartbeat.operation_id());
    if (message.has_value()) return Say(name, *std::move(message));
    lines_.push_back({"", absl::StrCat("unknown message ", words[1])});
  }

  void Request(const Words& words) {
    RequestArrived request;
    request.stream = Stream(words[1]);
    request.request_id = Option(words, "id", words[1]);
    request.principal = Option(words, "principal", "");
    request.client = Option(words, "client", request.principal);
    request.terms.weight = std::atof(Option(words, "weight", "1").c_str());
    const auto own = [&](const char* option) -> std::optional<int64_t> {
      const std::string text = Option(words, option, "");
      return text.empty() ? std::nullopt : std::optional<int64_t>(std::atoll(text.c_str()));
    };
    request.terms.max_requests_in_flight = own("in_flight");
    request.terms.max_queued_bytes = own("queued_bytes");
    request.fingerprint = std::atoll(Option(words, "header", "0").c_str());
    request.spec = SpecOf(std::atoll(Option(words, "tokens", "8").c_str()));
    if (Option(words, "option", "") == "segment_ids") request.spec.options.segment_ids = true;
    if (const int64_t length = std::atoll(Option(words, "segment_length", "0").c_str());
        length > 0) {
      request.spec.options.dilation_levels = {{length, 1, std::nullopt, 0, 1}};
    }
    request.choice.tuning.tile_q = std::atoi(Option(words, "tile_q", "0").c_str());
    const std::string members = Option(words, "members", "");
    if (!members.empty()) request.choice.members = absl::StrSplit(members, ',');
    if (Option(words, "dtype", "") == "bf16") request.spec.dtype = DType::kBFloat16;
    const int world = std::atoi(Option(words, "world", "0").c_str());
    if (world > 0) request.choice.world_size = world;
    const std::string region = Option(words, "region", "");
    if (const std::string spans = Option(words, "direct", ""); !spans.empty()) {
      request.transport.accept = {TransportKind::kDirectStream};
      request.transport.required = Option(words, "required", "") == "1";
      request.token_seed = absl::StrCat("seed of ", words[1]);
    } else if (!region.empty()) {
      request.transport.accept = {TransportKind::kHostMemory};
      request.transport.places = {{TensorId::kQ, RegionId(region), 0, 8}};
      request.transport.required = Option(words, "required", "") == "1";
    }
    const std::string deadline = Option(words, "deadline", "");
    if (!deadline.empty()) request.deadline = now_ + Duration(deadline);
    const std::string ttl = Option(words, "retain", "");
    if (!ttl.empty()) {
      request.retain = RequestArrived::Retain{absl::StrCat("h-", words[1]), Duration(ttl)};
    }
    request.terms.max_residual_bytes = own("residual_bytes");
    request.residual = Option(words, "residual", "");
    if (!request.residual.empty()) FillFromResidual(words, &request);
    Feed(request);
  }

  // As the edge does.
  void FillFromResidual(const Words& words, RequestArrived* request) {
    request->direction = Direction::kBackward;
    request->keep_residual = words.back() == "keep";
    const ResidualView view =
        core_.FindResidual(request->residual, request->principal, request->request_id);
    if (view.why_not) return;
    request->spec = *view.spec;
    request->choice = view.choice;
  }

  static std::string RegionId(const std::string& name) {
    return name + std::string(16 - name.size(), '.');
  }

  // Announced, and attached by these; or let go of.
  void Share(const Words& words) {
    AttachRequested attach;
    attach.bytes = 1000;
    attach.region_id = RegionId(words[1]);
    attach.is_new = shared_.insert(words[1]).second;
    attach.tokens = Words(8, "token");
    if (words[0] == "share") Feed(attach);
    for (size_t i = 2; i < words.size(); ++i) {
      v1::JoinRequest message;
      message.mutable_region_changed()->set_region_id(attach.region_id);
      message.mutable_region_changed()->set_attached(words[0] == "share");
      Say(words[i], message);
    }
  }

  // The request, and its members' answers until it is accepted or runs.
  void Serve(const Words& words, bool run) {
    Request(words);
    const std::pair<std::string, std::string> reserve = Hide("reserve ");
    if (reserve.first.empty()) return;
    const Words members = absl::StrSplit(reserve.first, ' ');
    const std::string operation = std::vector<std::string>(absl::StrSplit(reserve.second, ' '))[1];
    for (const std::string& member : members) {
      WorkerSays(member, {member, "reserved", operation, "residual=100"});
    }
    if (!run || Hide("accepted ").first.empty()) return;
    for (const std::string& member : members) WorkerSays(member, {member, "uploaded", operation});
  }

  // Takes the first line out whose text begins so; empty strings if there is none.
  std::pair<std::string, std::string> Hide(const std::string& begin) {
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      if (!absl::StartsWith(line->second, begin)) continue;
      auto hidden = *line;
      lines_.erase(line);
      return hidden;
    }
    return {};
  }

  void Wait(absl::Duration duration) {
    const absl::Time end = now_ + duration;
    while (now_ < end) {
      now_ += config_.tick_interval;
      if (now_ >= next_heartbeat_) {
        next_heartbeat_ += config_.heartbeat_interval;
        Heartbeats();
      }
      Feed(Tick{});
    }
  }

  void Heartbeats() {
    Words beating;
    for (const auto& [name, worker] : workers_) {
      if (!worker.silent) beating.push_back(name);
    }
    for (const std::string& name : beating) {
      v1::JoinRequest message;
      v1::Heartbeat& heartbeat = workers_[name].heartbeat;
      heartbeat.set_sequence(heartbeat.sequence() + 1);
      *message.mutable_heartbeat() = heartbeat;
      Say(name, message);
    }
  }

  // Feeds one event and then what the workers answer by themselves.
  void Feed(const Event& event) {
    std::deque<Event> events = {event};
    while (!events.empty()) {
      const std::vector<Action> actions = core_.Handle(events.front(), now_);
      events.pop_front();
      for (const Action& action : actions) {
        std::visit([&](const auto& value) { Note(value, &events); }, action);
      }
    }
  }

  void Note(const SendToWorker& send, std::deque<Event>* answers) {
    const std::string name = WorkerName(send.connection);
    const auto worker = workers_.find(name);
    if (worker == workers_.end() || worker->second.connection != send.connection) return;
    const v1::JoinResponse& message = send.message;
    v1::JoinRequest answer;
    std::string text;
    bool answered = true;
    switch (message.message_case()) {
      case v1::JoinResponse::kExpectRegion:
      case v1::JoinResponse::kForgetRegion:
      case v1::JoinResponse::kRegistered:
        return;
      case v1::JoinResponse::kPrepare:
        text = absl::StrCat("prepare ", message.prepare().generation(), " rank ",
                            message.prepare().rank(), " of ", message.prepare().world_size());
        answer.mutable_prepared()->set_generation(message.prepare().generation());
        break;
      case v1::JoinResponse::kCommit:
        text = absl::StrCat("commit ", message.commit().generation(), " [",
                            absl::StrJoin(message.commit().blobs(), " "), "]");
        answer.mutable_committed()->set_generation(message.commit().generation());
        break;
      case v1::JoinResponse::kTeardown:
        text = absl::StrCat("teardown ", message.teardown().generation());
        answer.mutable_torn_down()->set_generation(message.teardown().generation());
        worker->second.heartbeat.clear_operation_id();
        break;
      case v1::JoinResponse::kRelease:
        text = absl::StrCat("release ", message.release().operation_id(),
                            message.release().keep_residual() ? " keeping" : "");
        answer.mutable_released()->set_operation_id(message.release().operation_id());
        answer.mutable_released()->set_generation(message.release().generation());
        break;
      case v1::JoinResponse::kReserve:
        text = absl::StrCat("reserve ", message.reserve().operation_id(), " [",
                            absl::StrJoin(message.reserve().members(), " "), "]",
                            message.reserve().retain() ? " retain" : "",
                            message.reserve().residual().empty() ? "" : " reads ",
                            message.reserve().residual());
        NoteToken(name, message.reserve());
        answered = false;
        break;
      case v1::JoinResponse::kRun:
        text = absl::StrCat("run ", message.run().operation_id());
        answered = false;
        break;
      case v1::JoinResponse::kCancel:
        text = absl::StrCat("cancel ", message.cancel().operation_id());
        answered = false;
        break;
      case v1::JoinResponse::kDropResiduals:
        text = absl::StrCat("drop ", absl::StrJoin(message.drop_residuals().operation_ids(), " "));
        answered = false;
        break;
      case v1::JoinResponse::kLeave:
        text = absl::StrCat("leave: ", message.leave().reason());
        answered = false;
        break;
      case v1::JoinResponse::MESSAGE_NOT_SET:
        std::abort();
    }
    if (answered && !worker->second.manual) {
      if (!worker->second.silent) answers->push_back(WorkerMessage{send.connection, answer});
      return;
    }
    // The same words to several workers in a row make one line.
    if (!lines_.empty() && lines_.back().second == text) {
      absl::StrAppend(&lines_.back().first, " ", name);
    } else {
      lines_.push_back({name, text});
    }
  }

  // Every member's is its own, of every operation.
  void NoteToken(const std::string& worker, const v1::Reserve& reserve) {
    if (reserve.token().empty()) return;
    tokens_[{worker, reserve.operation_id()}] = reserve.token();
    if (!known_tokens_.insert(reserve.token()).second) lines_.push_back({worker, "token again"});
  }

  void Note(const DropWorker& drop, std::deque<Event>*) {
    const std::string name = WorkerName(drop.connection);
    lines_.push_back({name, absl::StrCat("dropped: ", drop.reason)});
    const auto worker = workers_.find(name);
    if (worker != workers_.end() && worker->second.connection == drop.connection) {
      workers_.erase(worker);
    }
  }

  static Planned Answer(const PlanThis& ask) {
    Planned answer{ask.stream, ask.generation, nullptr, ask.cost_seconds};
    absl::StatusOr<Plan> plan = PlanRequest(*ask.spec, ask.direction, ask.choice, ask.inputs);
    if (plan.ok()) {
      answer.plan = std::make_shared<const Plan>(WithoutSpans(*std::move(plan)));
    } else {
      answer.plan = plan.status();
    }
    return answer;
  }

  // Plans are made at once and unseen, until the script says `hold plans`.
  void Note(const PlanThis& ask, std::deque<Event>* answers) {
    if (!holds_plans_) {
      answers->push_back(Answer(ask));
      return;
    }
    held_plans_[ask.stream] = ask;
    lines_.push_back({StreamName(ask.stream), absl::StrCat("plan for ", ask.generation)});
  }

  void Note(const CancelPlan& cancel, std::deque<Event>*) {
    lines_.push_back({StreamName(cancel.stream), "stop planning"});
  }

  void Note(const AcceptRequest& accept, std::deque<Event>*) {
    Words members;
    for (const RingMember& member : accept.members) members.push_back(member.name);
    std::string text =
        absl::StrCat("accepted ", accept.operation_id, " on ", absl::StrJoin(members, " "));
    if (!accept.transport_reason.empty()) {
      absl::StrAppend(&text, " (", accept.transport_reason, ")");
    }
    for (const RingMember& member : accept.members) {
      if (member.token.empty()) continue;
      const bool same = tokens_[{member.name, accept.operation_id}] == member.token;
      absl::StrAppend(&text, " ", member.client_data_address, same ? "" : " WRONG TOKEN");
    }
    lines_.push_back({StreamName(accept.stream), text});
  }

  void Note(const BeginDownload& begin, std::deque<Event>*) {
    lines_.push_back({StreamName(begin.stream), "download"});
  }

  void Note(const FinishRequest& finish, std::deque<Event>*) {
    const std::string& handle = finish.residual_handle;
    const std::string& reason = finish.residual_reason;
    lines_.push_back(
        {StreamName(finish.stream), absl::StrCat("finished", handle.empty() ? "" : " ", handle,
                                                 reason.empty() ? "" : ", not kept: ", reason)});
  }

  void Note(const FailRequest& fail, std::deque<Event>*) {
    const Failure& failure = fail.failure;
    std::string text =
        absl::StrCat("failed ", absl::StatusCodeToString(failure.code), " ", failure.reason);
    if (failure.retry_after) absl::StrAppend(&text, " retry");
    if (!failure.field.empty()) absl::StrAppend(&text, " field ", failure.field);
    if (!failure.message.empty()) absl::StrAppend(&text, ": ", failure.message);
    lines_.push_back({StreamName(fail.stream), text});
  }

  void Note(const StateChanged&, std::deque<Event>*) {}
  void Note(const TransferAdvanced&, std::deque<Event>*) {}
  void Note(const AttachAnswered& answer, std::deque<Event>*) {
    if (answer.failure)
      lines_.push_back({"", absl::StrCat("not shared: ", answer.failure->reason)});
  }
  void Note(const LostWorker&, std::deque<Event>*) { ++losses_told_; }
  void Note(const TopologyChanged&, std::deque<Event>*) { published_ = core_.topology(); }

  void Note(const ServingChanged& changed, std::deque<Event>*) {
    lines_.push_back({"", changed.serving ? absl::StrCat("serving ", core_.topology().generation())
                                          : "not serving"});
  }

  void Note(const DrainCompleted&, std::deque<Event>*) { lines_.push_back({"", "drained"}); }

  void Note(const RingReformed& reformed, std::deque<Event>*) {
    lines_.push_back({"", absl::StrCat("reformed ", reformed.generation, " ",
                                       absl::StatusCodeToString(reformed.status.code()))});
  }

  void Flush() {
    for (const auto& [who, text] : lines_) {
      absl::StrAppend(&output_, "> ", who, who.empty() ? "" : ": ", text, "\n");
    }
    lines_.clear();
  }

  const CoordinatorConfig config_;
  Coordinator core_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  absl::Time next_heartbeat_ = now_;
  v1::Topology published_;
  size_t losses_told_ = 0;
  std::string output_;
  ScenarioLines lines_;
  std::map<std::string, Worker> workers_;
  std::map<ConnectionId, std::string> names_;
  ConnectionId last_connection_ = 0;
  std::map<std::string, StreamId> streams_;
  bool holds_plans_ = false;
  std::set<std::string> shared_;  // regions that were announced
  std::map<StreamId, PlanThis> held_plans_;
  std::map<std::pair<std::string, std::string>, std::string> tokens_;  // by worker, operation
  std::set<std::string> known_tokens_;
};

}  // namespace

CoordinatorConfig ScenarioConfig() {
  CoordinatorConfig config;
  config.version = "1";
  config.assembly_time_max = absl::ZeroDuration();
  return config;
}

std::string RunScenario(const std::string& script, const CoordinatorConfig& config) {
  return Scenario(config).Run(script);
}

}  // namespace ringattn::server
