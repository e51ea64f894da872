#include "tests/simulation/clients.h"

#include <algorithm>

#include "absl/strings/match.h"

namespace ringattn::server::simulation {
namespace {

constexpr int kMaxAttempts = 12;
// Members may make no progress, as while staging memory, for less than the limits (simulation.cc):
// 15 s, and 30 s more while downloading. All other delays of their answers take less than 3 s.
constexpr absl::Duration kUploadRestMax = absl::Seconds(12);
constexpr absl::Duration kDownloadRestMax = absl::Seconds(40);

AttentionSpec SpecOf(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.seq_len_q = tokens;
  spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = {0, tokens};
  spec.shape.cu_seqlens_k = {0, tokens};
  spec.options.causal = tokens % 2 == 0;
  return spec;
}

}  // namespace

void Clients::StartRandomCall(int max_world_size) {
  Random& random = world_->random;
  Call call;
  call.id = absl::StrCat("call-", calls_.size());
  if (random.OneIn(3)) call.principal = absl::StrCat("user-", random.Below(3));
  call.client = call.principal.empty() ? absl::StrCat("peer-", random.Below(4)) : call.principal;
  call.fingerprint = random.Next();
  call.tokens = random.OneIn(10) ? random.Below(3) : random.Below(2000);
  if (random.OneIn(2)) call.tokens = 512;  // like others
  call.world_size = random.Below(max_world_size + 1);
  call.backward = random.OneIn(3);
  call.upload_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(400));
  call.download_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(400));
  if (random.OneIn(12)) call.upload_time = random.Between(absl::Seconds(1), absl::Seconds(20));
  if (random.OneIn(12)) call.download_time = random.Between(absl::Seconds(1), absl::Seconds(20));
  call.idles = random.OneIn(25);
  call.takes_nothing = random.OneIn(25);
  if (random.OneIn(4)) call.deadline = random.Between(absl::ZeroDuration(), absl::Seconds(20));
  if (!call.backward && random.OneIn(3)) {
    call.retain = random.Between(absl::Milliseconds(100), absl::Seconds(20));
  }
  if (call.backward && random.OneIn(2)) ReadSomething(&call);
  call.direct = random.OneIn(3);
  call.is_inline = !call.direct && random.OneIn(2);
  if (call.retain == absl::ZeroDuration() && call.residual.empty() && random.OneIn(5)) {
    call.prepare = random.Between(absl::Milliseconds(100), absl::Seconds(20));
    call.direct = call.is_inline = false;
  } else if (!call.direct && !call.is_inline && random.OneIn(2)) {
    call.in_memory = true;
    call.idles = call.takes_nothing = false;
  }
  const std::string id = call.id;
  calls_[id] = std::move(call);
  if (!calls_.at(id).in_memory) return Open(id, /*other_header=*/false);
  Attach(calls_.at(id));
  world_->scheduler.After(absl::Milliseconds(300), [this, id] { Open(id, false); });
}

// A call's region has its name.
void Clients::Attach(const Call& call) {
  AttachRequested attach;
  attach.principal = call.principal;
  attach.client = call.client;
  attach.bytes = 1 << 20;
  attach.region_id = call.id;
  attach.is_new = true;
  attach.tokens = std::vector<std::string>(16, "token");
  control_->Feed(attach);
}

// Sometimes reads another principal's residual.
void Clients::ReadSomething(Call* call) {
  if (residuals_.empty()) return;
  const auto residual = std::next(residuals_.begin(), world_->random.Below(residuals_.size()));
  call->residual = residual->first;
  call->keep_residual = world_->random.OneIn(3);
  if (!world_->random.OneIn(8)) call->principal = residual->second.principal;
}

// As the edge does.
void Clients::FillResidual(const Call& call, RequestArrived* arrived) {
  arrived->residual = call.residual;
  arrived->keep_residual = call.keep_residual;
  const ResidualView view =
      control_->core().FindResidual(call.residual, call.principal, arrived->request_id);
  if (view.failure) return;
  arrived->spec = *view.spec;
  arrived->choice = view.choice;
}

void Clients::NoteResidual(const Call& call, const FinishRequest& finish) {
  if (!finish.residual_handle.empty()) {
    ++ends_["(kept)"];
    residuals_[finish.residual_handle] = {call.principal, world_->now() + call.retain};
  } else if (finish.residual_reason.empty() != (call.retain == absl::ZeroDuration())) {
    world_->Violate("neither kept nor given a reason: ", call.id);
  }
  if (call.residual.empty()) return;
  ++ends_["(read)"];
  residuals_.at(call.residual).consumed |= !call.keep_residual;
}

void Clients::NotePrepared(const Call& call, const Stream& stream, const FinishRequest& finish) {
  if (finish.prepared.has_value() != (call.prepare > absl::ZeroDuration())) {
    world_->Violate(call.id, ": prepared although it runs, or the reverse");
  }
  if (!finish.prepared.has_value()) return;
  const int members = static_cast<int>(stream.members.size());
  if (finish.prepared->ttl != call.prepare || finish.prepared->found > members) {
    world_->Violate(call.id, ": prepared otherwise");
  }
  ++ends_[finish.prepared->found == members ? "(prepared: found)" : "(prepared)"];
}

// A loss is always legal: a residual may be evicted to free memory.
std::string Clients::WhyIllegalResidual(const Call& call, const std::string& reason) const {
  const auto only = [](bool legal, const char* why) { return legal ? "" : why; };
  if (call.residual.empty()) return "it reads none";
  const Residual& residual = residuals_.at(call.residual);
  if (reason == "RESIDUAL_NOT_FOUND") {
    return only(residual.forgotten || residual.principal != call.principal, "it is its own");
  }
  if (residual.principal != call.principal) return "it is not its own";
  if (reason == "RESIDUAL_EXPIRED") return only(residual.expires <= world_->now(), "too early");
  if (reason == "RESIDUAL_CONSUMED") return only(residual.consumed, "nobody has");
  return only(reason == "RESIDUAL_LOST", "no such reason");
}

void Clients::StartGoodCall(const std::string& name, int world_size) {
  Call call;
  call.id = name;
  call.tokens = 64;
  call.world_size = world_size;
  call.good = true;
  call.upload_time = absl::Milliseconds(50);
  call.download_time = absl::Milliseconds(50);
  calls_[name] = std::move(call);
  Open(name, /*other_header=*/false);
}

void Clients::Open(const std::string& call_id, bool other_header) {
  Call& call = calls_.at(call_id);
  const StreamId id = ++last_stream_;
  Stream& stream = streams_[id];
  stream.call = call_id;
  stream.other_header = other_header;
  stream.deadline = world_->now() + call.deadline;
  if (!other_header) ++call.attempts;
  for (auto& [older_id, older] : streams_) {
    const bool same = older.call == call_id && older.other_header == other_header;
    if (older_id != id && same && !older.ended) older.superseded = true;
  }
  RequestArrived arrived;
  arrived.stream = id;
  arrived.request_id = call_id;
  arrived.principal = call.principal;
  arrived.client = call.client;
  arrived.fingerprint = call.fingerprint + other_header;
  arrived.spec = SpecOf(call.tokens);
  arrived.recipe_fingerprint =
      1 + 4 * call.tokens + 2 * (call.retain > absl::ZeroDuration()) + (call.backward ? 1 : 0);
  arrived.direction = call.backward ? Direction::kBackward : Direction::kForward;
  if (call.world_size > 0) arrived.choice.world_size = call.world_size;
  if (call.retain > absl::ZeroDuration()) {
    arrived.retain = RequestArrived::Retain{absl::StrCat("h-", id), call.retain};
  }
  if (call.direct) {
    arrived.transport.accept = {TransportKind::kDirectStream};
    arrived.token_seed = absl::StrCat("seed ", id);
  }
  if (call.in_memory) {
    arrived.transport.accept = {TransportKind::kHostMemory};
    arrived.transport.places = {{TensorId::kQ, call_id, 0, 8}};
  }
  if (call.is_inline) {
    arrived.inline_inputs =
        std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kQ, call_id}});
  }
  if (call.prepare > absl::ZeroDuration()) arrived.prepare_ttl = call.prepare;
  if (!call.residual.empty()) FillResidual(call, &arrived);
  arrived.deadline = stream.deadline;
  world_->Trace("stream ", id, ": ", call_id, " tokens ", call.tokens, " world ", call.world_size,
                other_header ? " with another header" : "");
  if (!call.good) PlanMischief(id);
  control_->Feed(arrived);
}

void Clients::PlanMischief(StreamId stream) {
  Random& random = world_->random;
  if (random.OneIn(6)) {
    world_->scheduler.After(random.Between(absl::ZeroDuration(), absl::Seconds(5)), [this, stream] {
      if (!InFlight(stream)) return;
      streams_.at(stream).cancelled = true;
      world_->Trace("stream ", stream, ": cancel");
      if (world_->random.OneIn(2)) {
        const std::string& call = streams_.at(stream).call;
        control_->Feed(CancelRequested{call, calls_.at(call).principal});
      } else {
        Failure why;
        why.code = absl::StatusCode::kCancelled;
        why.reason = "CLIENT_CANCELLED";
        control_->Feed(RequestEnded{stream, why});
      }
    });
  }
  if (random.OneIn(10)) {
    world_->scheduler.After(random.Between(absl::ZeroDuration(), absl::Seconds(3)),
                            [this, stream, other = random.OneIn(4)] {
                              if (InFlight(stream)) Open(streams_.at(stream).call, other);
                            });
  }
}

void Clients::OnAction(const Action& action) {
  if (const auto* accept = std::get_if<AcceptRequest>(&action)) {
    for (const auto& [id, other] : streams_) {
      // The failure of an ended stream may wait until no member writes into its memory.
      const bool same =
          other.call == streams_.at(accept->stream).call && !calls_.at(other.call).in_memory;
      if (same && id != accept->stream && Served(id)) {
        world_->Violate("streams ", id, " and ", accept->stream, " both serve ", other.call);
      }
    }
    Upload(accept->stream, *accept);
  } else if (const auto* begin = std::get_if<BeginDownload>(&action)) {
    Stream& stream = streams_.at(begin->stream);
    stream.uploading = false;
    stream.downloading = true;
    const bool prepares = calls_.at(stream.call).prepare > absl::ZeroDuration();
    const bool in_memory = calls_.at(stream.call).in_memory;
    if ((stream.is_inline && !prepares && !in_memory) != !begin->outputs.empty()) {
      world_->Violate("outputs on two ways");
    }
    if (prepares) return;
    if (stream.is_inline && in_memory) {
      ++ends_["(inline in memory)"];
      return;
    }
    if (stream.is_inline) {
      if (begin->outputs[0].data() != stream.operation_id) world_->Violate("another's outputs");
      ++ends_["(inline)"];
      return;
    }
    const Call& call = calls_.at(stream.call);
    if (!call.good && world_->random.OneIn(15)) {
      const int member = world_->random.Below(stream.members.size());
      stream.resting.insert(member);
      world_->scheduler.After(world_->random.Between(absl::Seconds(1), kDownloadRestMax),
                              [this, id = begin->stream, member] { EndRest(id, member); });
    }
    if (call.takes_nothing) return;
    if (!stream.direct) ReportDownload(begin->stream);
    world_->scheduler.After(call.download_time,
                            [this, id = begin->stream] { TryFinishDownload(id); });
  } else if (const auto* finish = std::get_if<FinishRequest>(&action)) {
    Stream& stream = streams_.at(finish->stream);
    world_->Trace("stream ", finish->stream, ": OK");
    if (!stream.downloading) world_->Violate("OK without the result");
    stream.ended = true;
    calls_.at(stream.call).succeeded = true;
    NoteResidual(calls_.at(stream.call), *finish);
    NotePrepared(calls_.at(stream.call), stream, *finish);
    ++ends_["OK"];
    last_end_ = world_->now();
  } else if (const auto* fail = std::get_if<FailRequest>(&action)) {
    OnFail(fail->stream, fail->failure);
  }
}

void Clients::Upload(StreamId id, const AcceptRequest& accept) {
  Stream& stream = streams_.at(id);
  const Call& call = calls_.at(stream.call);
  stream.operation_id = accept.operation_id;
  stream.uploading = true;
  world_->Trace("stream ", id, ": accepted ", accept.operation_id);
  for (const RingMember& member : accept.members) {
    SimWorker* worker = find_worker_(member.name);
    stream.members.emplace_back(worker, worker->process());
  }
  stream.is_inline = accept.is_inline;
  const bool prepares = call.prepare > absl::ZeroDuration();
  if (stream.is_inline && !call.is_inline && !call.in_memory && !prepares) {
    world_->Violate("inline without the inputs");
  }
  if (prepares && !stream.is_inline) world_->Violate("uploads of a request that is only prepared");
  if (stream.is_inline) return;
  for (size_t i = 0; i < stream.members.size(); ++i) {
    ++stream.uploads_due;
    if (call.idles && i + 1 == stream.members.size()) continue;
    absl::Duration time = world_->random.Between(0.5 * call.upload_time, call.upload_time);
    world_->scheduler.After(time, [this, id, i] { TakeUpload(id, i); });
  }
  const bool in_memory = accept.transport == v1::TRANSPORT_HOST_MEMORY;
  ends_["(in memory)"] += in_memory;
  stream.direct = in_memory || accept.transport == v1::TRANSPORT_DIRECT;
  if (in_memory ? !call.in_memory : stream.direct != call.direct) {
    world_->Violate("another transport than could be had");
  }
  if (stream.direct) return ReportTransfers(id);
  if (!call.idles) ReportUpload(id);
  ReportMembers(id);
}

// As the members say it themselves: now and then not at all, twice, or late.
void Clients::ReportTransfers(StreamId id) {
  if (!InFlight(id)) return;
  Stream& stream = streams_.at(id);
  const Call& call = calls_.at(stream.call);
  ++stream.moves;
  Random& random = world_->random;
  for (size_t i = 0; i < stream.members.size(); ++i) {
    const int member = static_cast<int>(i);
    const auto [worker, process] = stream.members[i];
    v1::TransferProgress progress;
    if (stream.uploading && worker->Reads(stream.operation_id)) {
      progress.set_waits_for_client(stream.taken.count(member) == 0);
      if (progress.waits_for_client() && !call.idles) progress.set_received(stream.moves);
    } else if (stream.downloading && !StandsStill(stream, member)) {
      progress.set_waits_for_client(true);
      if (!call.takes_nothing) progress.set_sent(stream.moves);
    }
    if (world_->weather != Weather::kCalm && random.OneIn(5)) continue;
    worker->SayTransfer(stream.operation_id, process, progress);
    if (random.OneIn(10)) worker->SayTransfer(stream.operation_id, process, progress);
    if (!random.OneIn(10)) continue;
    world_->scheduler.After(random.Between(absl::ZeroDuration(), absl::Seconds(1)),
                            [worker = worker, process = process, id = stream.operation_id,
                             progress] { worker->SayTransfer(id, process, progress); });
  }
  world_->scheduler.After(absl::Milliseconds(500), [this, id] { ReportTransfers(id); });
}

void Clients::TakeUpload(StreamId id, int member) {
  if (!InFlight(id)) return;
  Stream& stream = streams_.at(id);
  const auto [worker, process] = stream.members[member];
  if (!worker->Holds(stream.operation_id, process)) return FailShard(id, member);
  --stream.uploads_due;
  stream.taken.insert(member);
  if (!worker->Reads(stream.operation_id)) return;
  if (!calls_.at(stream.call).good && world_->random.OneIn(15)) {
    stream.resting.insert(member);
    world_->scheduler.After(world_->random.Between(absl::Seconds(1), kUploadRestMax),
                            [this, id, member] { EndRest(id, member); });
    return;
  }
  worker->FinishUpload(stream.operation_id, process);
}

void Clients::EndRest(StreamId id, int member) {
  if (!InFlight(id)) return;
  Stream& stream = streams_.at(id);
  stream.resting.erase(member);
  const auto [worker, process] = stream.members[member];
  if (!worker->Holds(stream.operation_id, process)) return FailShard(id, member);
  if (stream.uploading) worker->FinishUpload(stream.operation_id, process);
}

// Mirrors the edge's knowledge: once the client has sent everything, the edge waits for all members
// and does not know which of them have sent Uploaded or compute.
bool Clients::StandsStill(const Stream& stream, int member) const {
  const SimWorker* worker = stream.members[member].first;
  if (worker->stopped() || stream.resting.count(member) > 0) return true;
  if (stream.downloading) return !worker->Sends(stream.operation_id);
  return stream.uploads_due == 0 || !worker->Reads(stream.operation_id);
}

void Clients::ReportMembers(StreamId id) {
  if (!InFlight(id)) return;
  const Stream& stream = streams_.at(id);
  MembersStalled report;
  report.stream = id;
  for (size_t i = 0; i < stream.members.size(); ++i) {
    if (StandsStill(stream, i)) report.members.push_back(i);
  }
  control_->Feed(report);
  world_->scheduler.After(absl::Milliseconds(500), [this, id] { ReportMembers(id); });
}

void Clients::ReportUpload(StreamId stream) {
  if (!InFlight(stream) || !streams_.at(stream).uploading) return;
  control_->Feed(UploadProgressed{stream});
  world_->scheduler.After(absl::Seconds(1), [this, stream] { ReportUpload(stream); });
}

void Clients::ReportDownload(StreamId stream) {
  if (!InFlight(stream)) return;
  control_->Feed(DownloadProgressed{stream});
  world_->scheduler.After(absl::Seconds(1), [this, stream] { ReportDownload(stream); });
}

void Clients::FailShard(StreamId id, int member) {
  Stream& stream = streams_.at(id);
  if (stream.direct || std::exchange(stream.shard_failed, true)) return;
  world_->scheduler.After(world_->random.Between(absl::ZeroDuration(), absl::Milliseconds(200)),
                          [this, id, member] {
                            if (InFlight(id))
                              control_->Feed(ShardStreamFailed{id, member, "connection reset"});
                          });
}

void Clients::TryFinishDownload(StreamId id) {
  if (!InFlight(id)) return;
  const Stream& stream = streams_.at(id);
  for (size_t i = 0; i < stream.members.size(); ++i) {
    const auto [worker, process] = stream.members[i];
    if (!worker->Holds(stream.operation_id, process)) return FailShard(id, i);
    if (StandsStill(stream, i)) {
      world_->scheduler.After(absl::Milliseconds(500), [this, id] { TryFinishDownload(id); });
      return;
    }
  }
  if (!stream.direct) return control_->Feed(DownloadFinished{id});
  for (const auto& [worker, process] : stream.members) {
    worker->SayDelivered(stream.operation_id, process);
    if (world_->random.OneIn(4)) worker->SayDelivered(stream.operation_id, process);
  }
}

void Clients::OnFail(StreamId id, const Failure& failure) {
  Stream& stream = streams_.at(id);
  world_->Trace("stream ", id, ": ", absl::StatusCodeToString(failure.code), " ", failure.reason,
                " ", failure.message);
  stream.ended = true;
  ++ends_[failure.reason];
  // Others of the same request may run.
  const bool alone = std::none_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
    return entry.first != id && entry.second.call == stream.call;
  });
  if (world_->weather == Weather::kCalm && alone && writes_for_(stream.call)) {
    world_->Violate("stream ", id, " fails while a member writes into its memory");
  }
  if (absl::StrContains(failure.message, "no bytes of its inputs")) ++ends_["(took no inputs)"];
  if (absl::StrContains(failure.message, "no bytes of its outputs")) ++ends_["(sent no outputs)"];
  last_end_ = world_->now();
  const std::string illegal = WhyIllegal(stream, failure);
  if (!illegal.empty()) {
    world_->Violate("stream ", id, ": ", absl::StatusCodeToString(failure.code), " ",
                    failure.reason, " (", failure.message, "): ", illegal);
  }
  const Call& call = calls_.at(stream.call);
  const bool replay = failure.retry_after.has_value() && !stream.superseded && !stream.cancelled &&
                      call.attempts < kMaxAttempts;
  if (!replay) return;
  world_->scheduler.After(*failure.retry_after, [this, call_id = stream.call] {
    for (const auto& [other_id, other] : streams_) {
      if (other.call == call_id && !other.ended) return;
    }
    Open(call_id, /*other_header=*/false);
  });
}

// Empty if the request may end like that.
std::string Clients::WhyIllegal(const Stream& stream, const Failure& failure) const {
  const Call& call = calls_.at(stream.call);
  const auto only = [](bool condition, const char* why) { return condition ? "" : why; };
  switch (failure.code) {
    case absl::StatusCode::kCancelled: {
      // Cancel names the request, so it ends every stream of that request.
      bool asked = stream.cancelled;
      for (const auto& [id, other] : streams_) {
        asked |= other.call == stream.call && other.cancelled;
      }
      if (failure.reason == "REGION_RELEASED") return only(call.in_memory, "it has no region");
      return only(asked, "nobody cancelled");
    }
    case absl::StatusCode::kDeadlineExceeded:
      if (failure.reason == "UPLOAD_IDLE") {
        return only(call.idles, "it uploaded steadily");
      }
      if (failure.reason == "DOWNLOAD_IDLE") {
        return only(call.takes_nothing, "it downloaded steadily");
      }
      if (failure.reason == "DEADLINE_TOO_SHORT") {
        return only(call.deadline < absl::InfiniteDuration(), "it has no deadline");
      }
      return only(stream.deadline <= world_->now(), "the deadline has not passed");
    case absl::StatusCode::kInvalidArgument:
      // The coordinator has started again, or had no worker for the region.
      if (failure.reason == "REGION_UNKNOWN") return only(call.in_memory, "it has no region");
      return only(failure.reason == "REQUEST_ID_REUSED" && failure.field == "request_id",
                  "nothing was wrong with it");
    case absl::StatusCode::kAborted:
      if (failure.reason == "SUPERSEDED") {
        return only(stream.superseded && !failure.retry_after, "no newer stream replaced it");
      }
      if (!failure.retry_after) return "no RetryInfo";
      if (!world_->fault_injected) return "nothing was lost";
      if (world_->weather == Weather::kSingleFault && failure.reason != "SHARD_STREAM_BROKEN" &&
          !absl::StrContains(failure.message, absl::StrCat("(", world_->faulty_worker, ")"))) {
        return absl::StrCat("the fault was ", world_->faulty_worker, "'s");
      }
      return "";
    case absl::StatusCode::kUnavailable:
      if (!failure.retry_after) return "no RetryInfo";
      if (failure.reason == "DRAINING") return only(was_drained_, "never drained");
      return only(world_->fault_injected || world_->now() - world_->start < absl::Seconds(6),
                  "a ring was formed");
    case absl::StatusCode::kResourceExhausted:
      return "";
    case absl::StatusCode::kNotFound:
      return WhyIllegalResidual(call, failure.reason);
    case absl::StatusCode::kFailedPrecondition:
      if (absl::StartsWith(failure.reason, "RESIDUAL_")) {
        return WhyIllegalResidual(call, failure.reason);
      }
      if (failure.reason == "NOT_KEPT") {
        return only(call.prepare > absl::ZeroDuration(), "it is not only prepared");
      }
      return only(call.world_size > 1, "it did not ask for workers");
    case absl::StatusCode::kInternal:
      return only(compute_may_fail_ || world_->fault_injected, "nothing failed");
    default:
      return "no such code";
  }
}

void Clients::OnCoordinatorRestarted() {
  for (auto& [handle, residual] : residuals_) residual.forgotten = true;
  std::vector<std::string> lost;
  for (auto& [id, stream] : streams_) {
    if (stream.ended) continue;
    stream.ended = true;
    if (!stream.superseded && !stream.cancelled && !stream.other_header) {
      lost.push_back(stream.call);
    }
  }
  for (const std::string& call : lost) {
    if (calls_.at(call).attempts >= kMaxAttempts) continue;
    world_->scheduler.After(absl::Seconds(1), [this, call] { Open(call, false); });
  }
}

bool Clients::Served(StreamId stream) const {
  const Stream& it = streams_.at(stream);
  return !it.ended && !it.operation_id.empty();
}

bool Clients::AllEnded() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& entry) { return entry.second.ended; });
}

}  // namespace ringattn::server::simulation
