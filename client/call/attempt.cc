#include "client/call/attempt.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include <grpcpp/alarm.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/call/transport_reason.h"
#include "client/stream/stream_messages.h"
#include "client/transfer/direct_transfer.h"
#include "client/transfer/grpc_status.h"
#include "client/transfer/server_error.h"
#include "common/schedule/schedule.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"

namespace ringattn::client {
namespace {

// How many received chunks are copied into the outputs concurrently. Each is held whole meanwhile.
// The stream's flow-control window may hold one more.
constexpr int kConcurrentChunks = 2;

// How long to wait for the coordinator's status after a direct stream has failed.
constexpr std::chrono::seconds kTrailerWait{2};

// The reading side (OnRead..., OnDone) and the writing side (OnWriteDone) each run on one thread at
// a time, concurrently with each other. They share gate_, borrowed_ and stream_; every other
// member belongs to one side. Several threads may copy and report chunks concurrently with the
// reading side, which ends after them. They share filling_, failure_ and progress_mutex_.
class StreamAttempt final : public Attempt,
                            public CallStream::User,
                            public std::enable_shared_from_this<StreamAttempt> {
 public:
  StreamAttempt(const AttemptChannels& channels, std::shared_ptr<const CallPlan> plan,
                std::chrono::system_clock::time_point deadline, const AttemptTerms& terms,
                std::function<void(AttemptResult)> done)
      : workers_(channels.workers),
        sharer_(channels.sharer),
        host_history_(channels.host_history),
        plan_(std::move(plan)),
        deadline_(deadline),
        done_(std::move(done)),
        assembler_(plan_->outputs),
        start_(std::chrono::steady_clock::now()) {
    if (!plan_->direct) {
      no_direct_reason_ = plan_->no_direct_reason;
    } else if ((!terms.no_direct.empty() && !plan_->writer.has_value()) || workers_ == nullptr) {
      no_direct_reason_ = absl::StrCat("no direct stream: ", terms.no_direct);
    } else {
      offers_direct_ = true;
    }
    if (!terms.offers_host) {
      no_host_reason_ = "the coordinator did not know the regions";
    } else if (plan_->host == nullptr) {
      no_host_reason_ = plan_->no_host_reason;
    } else {
      if (plan_->only_host) attachments_ = plan_->host->Attachments();
      offer_ = plan_->host->Options(plan_->host_required, &no_host_reason_);
    }
    // The tensors of other calls may have to follow the header.
    const bool is_whole = plan_->sends_only_header ||
                          (offer_.has_value() && (plan_->only_host || plan_->host_required));
    const bool may_be_whole = offer_.has_value() && terms.host_alone;
    const CallStreamOptions options{plan_->kind, deadline, plan_->traceparent};
    if ((is_whole || may_be_whole) && sharer_ != nullptr) stream_ = sharer_->Open(options, this);
    host_alone_ = stream_ != nullptr && !is_whole;
    if (host_alone_) {
      offer_->set_required(true);
      offers_direct_ = false;
    }
    if (stream_ == nullptr) {
      stream_ = MakeOwnCallStream(channels.coordinator, channels.token.get(), options, this);
    }
  }

  void Start() override {
    self_ = shared_from_this();
    write_buffer_ = Header();
    if (plan_->sends_only_header) {
      stream_->WriteLast(&write_buffer_);
    } else {
      stream_->Write(&write_buffer_);
    }
    stream_->Read(&read_buffer_);
    stream_->Start();
  }

  void Cancel() override {
    const std::lock_guard lock(mutex_);
    user_cancelled_ = true;
    if (stream_ != nullptr) stream_->TryCancel();
  }

 private:
  void Abandon() {
    const std::lock_guard lock(mutex_);
    if (stream_ != nullptr) stream_->TryCancel();
  }

  // The plan's header with this stream's TransportOptions.
  grpc::ByteBuffer Header() const {
    v1::TransportOptions options;
    if (offer_) {
      options = *offer_;
    } else if (plan_->host_required) {
      options.add_accept(plan_->on_cuda ? v1::TRANSPORT_CUDA_MEMORY : v1::TRANSPORT_HOST_MEMORY);
      options.set_required(true);
    }
    if (offers_direct_) {
      options.add_accept(v1::TRANSPORT_DIRECT);
      if (plan_->direct_required) options.set_required(true);
    }
    if (plan_->writer.has_value()) *options.mutable_writer() = *plan_->writer;
    if (options.accept().empty() && !options.has_writer()) return plan_->header;
    return WithTransport(plan_->kind, plan_->header, options);
  }

  // --- Writing: header, wait for Accepted, chunks, half-close -------------------

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // the stream has ended; OnDone has the reason
    if (!header_written_) {
      header_written_ = true;
      PassGate();
      return;
    }
    ReportTransfer(v1::REQUEST_STATE_UPLOADING, source_->dealt_bytes(), source_->total_bytes());
    WriteNextChunk();
  }

  // Starts the upload when called for the second time: the header is written and Accepted has
  // arrived.
  void PassGate() {
    if (gate_.fetch_sub(1) == 1) WriteNextChunk();
  }

  void WriteNextChunk() {
    std::optional<ChunkSource::Chunk> chunk = source_->Next();
    if (!chunk) {
      times_.uploaded_seconds = SecondsSinceStart();
      if (!plan_->sends_only_header && !took_single_) stream_->WritesDone();
      return;
    }
    wire::ChunkHeader header{.tensor = chunk->tensor, .offset = chunk->offset};
    if (plan_->with_crc32c) {
      header.crc32c = wire::Crc32c(chunk->bytes.data(), chunk->bytes.size());
    }
    const grpc::Slice payload = SliceOf(*chunk);
    write_buffer_ = wire::MakeChunkBuffer(
        wire::EncodeChunkPrefix(RequestTypeOf(plan_->kind), header, chunk->bytes.size()),
        {payload});
    stream_->Write(&write_buffer_);
  }

  grpc::Slice SliceOf(ChunkSource::Chunk& chunk) {
    if (chunk.gathered != nullptr) {
      return wire::BorrowSlice(
          chunk.bytes.data(), chunk.bytes.size(),
          [](void* gathered) { delete[] static_cast<uint8_t*>(gathered); },
          chunk.gathered.release());
    }
    borrowed_.fetch_add(1);
    return wire::BorrowSlice(
        chunk.bytes.data(), chunk.bytes.size(),
        [](void* borrowed) { static_cast<std::atomic<int64_t>*>(borrowed)->fetch_sub(1); },
        &borrowed_);
  }

  // --- Reading ------------------------------------------------------------------

  void OnReadDone(bool ok) override {
    if (!ok) return;
    server_answered_ = true;
    const auto message = wire::ReceivedMessage::Parse(ResponseTypeOf(plan_->kind), read_buffer_);
    if (!message.ok()) return Break(ServerError(message.status().message()));
    if (message->is_chunk()) return TakeChunk(*message);
    if (absl::Status status = TakeControl(); !status.ok()) return Break(std::move(status));
    stream_->Read(&read_buffer_);
  }

  // Records the first failure and ends the stream; later results do not matter.
  void Break(absl::Status why) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.ok()) failure_ = std::move(why);
    }
    Abandon();
  }

  absl::Status TakeControl() {
    absl::StatusOr<ControlMessage> control = ParseControl(plan_->kind, &read_buffer_);
    if (!control.ok()) return ServerError(control.status().message());
    if (control->accepted) return TakeAccepted(*std::move(control->accepted));
    if (control->progress) Report(*control->progress);
    if (control->summary) summary_ = *std::move(control->summary);
    if (control->single) return TakeSingle(*std::move(control->single));
    return absl::OkStatus();
  }

  absl::Status TakeSingle(v1::SingleReply single) {
    if (!plan_->sends_only_header && !offer_) {
      return ServerError("a SingleReply, which was not requested");
    }
    took_single_ = true;  // the status arrives with it
    absl::Status status = TakeAccepted(std::move(*single.mutable_accepted()));
    for (const v1::TensorChunk& chunk : single.chunks()) {
      if (!status.ok()) return status;
      status = TakeChunk(chunk);
    }
    if (single.has_summary()) summary_ = std::move(*single.mutable_summary());
    return status;
  }

  absl::Status TakeChunk(const v1::TensorChunk& chunk) {
    wire::ChunkHeader header{.tensor = chunk.tensor(), .offset = chunk.offset()};
    if (chunk.has_crc32c()) header.crc32c = chunk.crc32c();
    const wire::Fragment data{reinterpret_cast<const uint8_t*>(chunk.data().data()),
                              chunk.data().size()};
    if (absl::Status status = ClaimChunk(header, data.size); !status.ok()) return status;
    if (absl::Status status = assembler_.Fill(header, {&data, 1}, data.size); !status.ok()) {
      return status;
    }
    ReportFilled();
    return absl::OkStatus();
  }

  absl::Status ClaimChunk(const wire::ChunkHeader& header, uint64_t payload_bytes) {
    if (!accepted_) return ServerError("a chunk before Accepted");
    if (!by_coordinator_) return ServerError("a relayed chunk in a call that is not relayed");
    if (summary_) return ServerError("a chunk after the summary");
    if (times_.first_output_seconds == 0) times_.first_output_seconds = SecondsSinceStart();
    return assembler_.Claim(header, payload_bytes);
  }

  // Reads the next message while this one is copied. Copying into memory that is touched for the
  // first time takes longer than receiving.
  void TakeChunk(const wire::ReceivedMessage& message) {
    absl::Status claimed = ClaimChunk(message.chunk(), message.payload_bytes());
    if (!claimed.ok()) return Break(std::move(claimed));
    if (filling_.fetch_add(1) + 1 < kConcurrentChunks) stream_->Read(&read_buffer_);
    absl::Status status =
        assembler_.Fill(message.chunk(), message.payload(), message.payload_bytes());
    if (status.ok()) {
      ReportFilled();
    } else {
      Break(std::move(status));
    }
    if (filling_.fetch_sub(1) == kConcurrentChunks) stream_->Read(&read_buffer_);
  }

  // A later report never shows less progress, so threads may skip a report while another is in the
  // callback, which may be slow (a terminal). This keeps gRPC's few threads free. The last chunk
  // always reports.
  void ReportFilled() {
    if (!plan_->on_progress) return;
    std::unique_lock lock(progress_mutex_, std::defer_lock);
    if (assembler_.received_bytes() == assembler_.total_bytes()) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return;
    }
    plan_->on_progress(TransferProgress(v1::REQUEST_STATE_DOWNLOADING, assembler_.received_bytes(),
                                        assembler_.total_bytes()));
  }

  absl::Status TakeAccepted(v1::Accepted accepted) {
    if (accepted_) return ServerError("a second Accepted");
    if (absl::Status status = assembler_.CheckAnnounced(accepted.outputs()); !status.ok()) {
      return status;
    }
    times_.accepted_seconds = SecondsSinceStart();
    if (sharer_ != nullptr) sharer_->Learn(accepted.max_calls_per_stream());
    const v1::Transport wished =
        plan_->on_cuda ? v1::TRANSPORT_CUDA_MEMORY : v1::TRANSPORT_HOST_MEMORY;
    const bool by_host = accepted.transport() == wished;
    if (plan_->on_cuda && !by_host) {
      return ServerError("Accepted does not name CUDA memory, which is required");
    }
    const bool by_direct = accepted.transport() == v1::TRANSPORT_DIRECT;
    if (by_host && !offer_)
      return ServerError("Accepted names host or CUDA memory, which was not offered");
    if (by_direct && !offers_direct_)
      return ServerError("Accepted names direct streams, which were not offered");
    by_coordinator_ = !by_host && !by_direct;
    if (by_coordinator_ && plan_->writer.has_value()) {
      return ServerError("Accepted names the relay, which writers cannot use");
    }
    if (by_coordinator_ && (plan_->only_host || host_alone_)) {
      return ServerError("Accepted names the relay, which the call does not accept");
    }
    if (offer_ && host_history_ != nullptr) host_history_->Accepted(by_host);
    // A worker lacks a region, possibly after a restart.
    if (offer_ && !by_host) plan_->host->AttachAgain();
    const uint64_t chunk_bytes = ChunkBytesUp(plan_->max_chunk_bytes_up, accepted);
    source_.emplace(by_coordinator_ ? plan_->inputs : std::vector<InputTensor>(), chunk_bytes);
    if (by_direct) {
      if (absl::Status status = StartDirect(accepted, chunk_bytes); !status.ok()) return status;
    }
    accepted_ = std::move(accepted);
    if (plan_->on_accepted) {
      const std::lock_guard lock(progress_mutex_);
      plan_->on_accepted(*accepted_);
    }
    PassGate();
    return absl::OkStatus();
  }

  // --- Streams to the workers ---------------------------------------------------

  absl::Status StartDirect(const v1::Accepted& accepted, uint64_t chunk_bytes) {
    const std::optional<ScheduleKind> schedule = FromProto(accepted.plan().schedule());
    auto tensors =
        ShardTensors::Make(accepted.tickets(), plan_->inputs, plan_->direct_outputs, chunk_bytes,
                           schedule.has_value() && KeepsKeysInPlace(*schedule), plan_->rows);
    if (!tensors.ok()) return tensors.status();
    const auto self = shared_from_this();
    DirectTransferEvents events{
        .on_moved = [self](uint64_t dealt,
                           uint64_t received) { self->OnDirectMoved(dealt, received); },
        .on_broken = [self](const absl::Status& why,
                            bool unreachable) { self->OnDirectBroken(why, unreachable); },
        .on_ended = [self] { self->OneEnded(); }};
    auto transfer = std::make_shared<DirectTransfer>(
        accepted, *std::move(tensors), workers_.get(),
        DirectTransferOptions{
            .deadline = deadline_,
            .max_chunk_bytes_down = accepted.max_chunk_bytes_down(),
            .with_crc32c = plan_->with_crc32c,
            .writer = plan_->rows.has_value() ? static_cast<uint32_t>(plan_->rows->index) : 0,
            .connect_timeout = plan_->direct_required ? kRequiredConnectTime : kDirectConnectTime},
        std::move(events), &borrowed_);
    unended_.fetch_add(1);
    {
      const std::lock_guard lock(mutex_);
      transfer_ = transfer;
    }
    transfer->Start();
    return absl::OkStatus();
  }

  void OnDirectMoved(uint64_t dealt, uint64_t received) {
    if (!plan_->on_progress) return;
    const std::shared_ptr<DirectTransfer> transfer = Transfer();
    const ShardTensors& tensors = transfer->tensors();
    if (received > 0) {
      ReportTransfer(v1::REQUEST_STATE_DOWNLOADING, received, tensors.bytes_down());
    } else {
      ReportTransfer(v1::REQUEST_STATE_UPLOADING, dealt, tensors.bytes_up());
    }
  }

  // Waits briefly for the coordinator's status, which may explain the failure.
  void OnDirectBroken(const absl::Status& why, bool unreachable) {
    const std::lock_guard lock(mutex_);
    if (stream_ == nullptr) return;
    direct_failure_ = why;
    unreachable_ = unreachable;
    if (unreachable) return stream_->TryCancel();
    trailer_wait_.emplace();
    trailer_wait_->Set(std::chrono::system_clock::now() + kTrailerWait,
                       [self = shared_from_this()](bool passed) {
                         if (passed) self->Abandon();
                       });
  }

  std::shared_ptr<DirectTransfer> Transfer() {
    const std::lock_guard lock(mutex_);
    return transfer_;
  }

  // --- Progress -----------------------------------------------------------------

  static v1::Progress TransferProgress(v1::RequestState state, uint64_t bytes,
                                       uint64_t total_bytes) {
    v1::Progress progress;
    progress.set_state(state);
    progress.set_fraction_done(total_bytes == 0 ? 1.0 : static_cast<double>(bytes) / total_bytes);
    return progress;
  }

  void ReportTransfer(v1::RequestState state, uint64_t bytes, uint64_t total_bytes) {
    if (plan_->on_progress) Report(TransferProgress(state, bytes, total_bytes));
  }

  void Report(const v1::Progress& progress) {
    if (!plan_->on_progress) return;
    const std::lock_guard lock(progress_mutex_);
    plan_->on_progress(progress);
  }

  // --- The end ------------------------------------------------------------------

  void OnDone(const grpc::Status& status) override {
    result_.status = failure_.ok() ? FromGrpcStatus(status) : failure_;
    // After OK, chunks that workers still send belong to the result.
    if (const auto transfer = Transfer(); transfer != nullptr && !result_.status.ok()) {
      transfer->Cancel();
    }
    // gRPC itself creates UNAVAILABLE without details if the connection fails.
    result_.server_answered = server_answered_ || !status.error_details().empty() ||
                              status.error_code() != grpc::StatusCode::UNAVAILABLE;
    OneEnded();
  }

  // The last stream to end, of this one and the direct streams, delivers the result.
  void OneEnded() {
    if (unended_.fetch_sub(1) == 1) Conclude();
  }

  void Conclude() {
    TakeDirectEnd();
    if (result_.status.ok()) result_.status = CheckEnd();
    if (accepted_) result_.report.accepted = *std::move(accepted_);
    SayTransport();
    if (summary_) result_.report.summary = *std::move(summary_);
    times_.began = start_;
    times_.finished_seconds = SecondsSinceStart();
    result_.report.times = times_;
    write_buffer_.Clear();
    {
      // The stream holds the call, which holds the slices that were not sent.
      const std::lock_guard lock(mutex_);
      stream_.reset();
      transfer_.reset();      // it refers to this
      trailer_wait_.reset();  // it refers to this
    }
    if (!offer_ || result_.status.ok() || !DetailsOf(result_.status).reason.empty()) {
      return FinishWhenMemoryIsFree(std::chrono::microseconds(200));
    }
    // The service did not confirm that writing has stopped, so the workers have to. Continues
    // from a timer, because the caller may release its regions in `done`.
    plan_->host->Fence(offer_->fence_number(), [this](const std::string& unsure) {
      if (!unsure.empty()) {
        result_.status =
            WithMessage(result_.status,
                        absl::StrCat(result_.status.message(), " (", unsure,
                                     " did not confirm that it stopped writing to the memory)"));
      }
      alarm_.emplace();
      alarm_->Set(std::chrono::system_clock::now(),
                  [this](bool) { FinishWhenMemoryIsFree(std::chrono::microseconds(200)); });
    });
  }

  // Adds the status of the direct streams where the coordinator's status does not explain the
  // failure.
  void TakeDirectEnd() {
    const std::shared_ptr<DirectTransfer> transfer = Transfer();
    if (transfer == nullptr) return;
    times_.uploaded_seconds = transfer->uploaded_seconds(start_);
    times_.first_output_seconds = transfer->first_output_seconds(start_);
    complete_ = transfer->tensors().complete();
    const std::lock_guard lock(mutex_);
    if (direct_failure_.ok()) return;
    const bool unsaid = result_.status.ok() || (absl::IsCancelled(result_.status) &&
                                                DetailsOf(result_.status).reason.empty());
    if (!unsaid || user_cancelled_) return;
    if (unreachable_) result_.no_direct = std::string(direct_failure_.message());
    // Damaged data and protocol violations would repeat on a retry.
    const bool is_final = absl::IsDataLoss(direct_failure_) || absl::IsInternal(direct_failure_);
    result_.status = is_final ? direct_failure_
                              : absl::UnavailableError(absl::StrCat("a direct stream failed: ",
                                                                    direct_failure_.message()));
  }

  void SayTransport() {
    CallReport& report = result_.report;
    report.transport_reason =
        TransportReason(report.accepted, {&no_host_reason_, &no_direct_reason_});
    const ErrorDetails details = DetailsOf(result_.status);
    const std::string& reason = details.reason;
    // A coordinator that does not know this transport rejects it by field.
    for (const FieldViolation& violation : details.violations) {
      if (offers_direct_ && absl::StartsWith(violation.field, "transport.accept")) {
        result_.no_direct = "the coordinator does not support direct streams";
      }
    }
    result_.region_unknown = offer_ && reason == "REGION_UNKNOWN";
    const bool unavailable = reason == "TRANSPORT_UNAVAILABLE";
    if (offer_ && (result_.region_unknown || unavailable)) plan_->host->AttachAgain();
    if (plan_->only_host && (result_.region_unknown || unavailable)) {
      result_.lacked_at = attachments_;
    }
    result_.host_alone_failed = host_alone_ && (result_.region_unknown || unavailable);
    if (unavailable && !no_host_reason_.empty()) {
      result_.status = WithMessage(
          result_.status, absl::StrCat(result_.status.message(), " (", no_host_reason_, ")"));
    }
  }

  absl::Status CheckEnd() const {
    if (!accepted_) return ServerError("the stream ended without Accepted");
    if (!summary_) return ServerError("the stream ended without a summary");
    // Outputs that workers wrote or sent directly did not pass here.
    if (by_coordinator_) return assembler_.CheckComplete();
    return complete_ ? absl::OkStatus()
                     : ServerError("the stream ended before all outputs were sent");
  }

  // gRPC drops the last borrowed slices on its own threads while it holds locks. Therefore a timer
  // polls and reports the end.
  void FinishWhenMemoryIsFree(std::chrono::microseconds pause) {
    if (borrowed_.load() == 0) {
      const std::shared_ptr<StreamAttempt> self = std::move(self_);
      // The last reference to a channel must not be dropped here, because gRPC would then join this
      // thread. Release everything that leads to it before reporting the end.
      read_buffer_.Clear();
      plan_.reset();
      workers_.reset();
      done_(std::move(result_));
      return;
    }
    alarm_.emplace();
    alarm_->Set(std::chrono::system_clock::now() + pause, [this, pause](bool) {
      FinishWhenMemoryIsFree(
          std::min<std::chrono::microseconds>(2 * pause, std::chrono::milliseconds(20)));
    });
  }

  double SecondsSinceStart() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  std::shared_ptr<WorkerChannels> workers_;
  CallSharer* const sharer_;
  HostHistory* const host_history_;
  std::shared_ptr<const CallPlan> plan_;
  const std::chrono::system_clock::time_point deadline_;
  const std::function<void(AttemptResult)> done_;
  std::optional<v1::TransportOptions>
      offer_;                   // host or CUDA memory, with locations; constant after construction
  std::string no_host_reason_;  // why offer_ is empty
  std::vector<uint64_t> attachments_;  // before the offer; only for only_host
  bool host_alone_ = false;       // offer_ is all that the call offers, although it accepts more
  bool offers_direct_ = false;    // constant after construction
  std::string no_direct_reason_;  // why not
  std::shared_ptr<StreamAttempt> self_;  // until done_ has been called

  // Writing side.
  grpc::ByteBuffer write_buffer_;
  bool header_written_ = false;

  // Reading side.
  grpc::ByteBuffer read_buffer_;
  OutputAssembler assembler_;
  std::optional<v1::Accepted> accepted_;
  std::optional<v1::Summary> summary_;
  std::atomic<int> filling_{0};  // chunks being copied
  bool server_answered_ = false;
  bool by_coordinator_ = true;
  bool complete_ = true;  // of what did not pass the coordinator

  // Created by the reading side before PassGate, then used by the writing side.
  std::optional<ChunkSource> source_;
  std::atomic<int> gate_{2};
  std::atomic<bool> took_single_{false};
  std::atomic<int64_t> borrowed_{0};  // slices of the caller's memory that gRPC holds

  std::mutex progress_mutex_;  // serialises calls of on_progress and on_accepted
  // Streams in flight: this one, and one for all direct streams together.
  std::atomic<int> unended_{1};

  std::mutex mutex_;  // guards the members up to stream_, which is null once the call has ended
  bool user_cancelled_ = false;
  absl::Status failure_;  // from the reading side; read in OnDone
  absl::Status direct_failure_;
  bool unreachable_ = false;
  std::shared_ptr<DirectTransfer> transfer_;  // until all streams have ended
  std::optional<grpc::Alarm> trailer_wait_;
  std::unique_ptr<CallStream> stream_;

  std::optional<grpc::Alarm> alarm_;
  AttemptResult result_;
  ClientTimes times_;  // each member is written by one side and read in OnDone
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace

std::shared_ptr<Attempt> MakeAttempt(const AttemptChannels& channels,
                                     std::shared_ptr<const CallPlan> plan,
                                     std::chrono::system_clock::time_point deadline,
                                     const AttemptTerms& terms,
                                     std::function<void(AttemptResult)> done) {
  return std::make_shared<StreamAttempt>(channels, std::move(plan), deadline, terms,
                                         std::move(done));
}

}  // namespace ringattn::client
