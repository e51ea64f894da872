#include "client/transfer/direct_transfer.h"

#include <algorithm>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/transfer/grpc_status.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/open_metadata.h"
#include "ringattn/v1/shard.pb.h"

namespace ringattn::client {
namespace {

constexpr char kExchange[] = "/ringattn.v1.ShardService/Exchange";
// A connected worker answers at once, unless it is very busy.
constexpr std::chrono::milliseconds kAnswerTimeout{9'000};
// Fewer bytes do not justify a separate stream.
constexpr uint64_t kLeastBytesPerStream = 2 << 20;

absl::Status WorkerError(absl::string_view what) {
  return absl::InternalError(absl::StrCat("the worker violated the protocol: ", what));
}

int64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

double SecondsBetween(std::chrono::steady_clock::time_point start, int64_t end) {
  if (end == 0) return 0;
  const std::chrono::steady_clock::duration since(end);
  return std::chrono::duration<double>(since - start.time_since_epoch()).count();
}

}  // namespace

// One stream to a member. Its writing side and its reading side each run on one thread at a time.
class DirectTransfer::Stream final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(DirectTransfer* transfer, std::shared_ptr<grpc::Channel> channel,
         const v1::ShardTicket& ticket, uint32_t part, uint32_t parts)
      : transfer_(transfer),
        channel_(std::move(channel)),
        stub_(std::in_place, channel_),
        rank_(static_cast<int>(ticket.rank())),
        worker_(absl::StrCat(ticket.worker(), " at ", ticket.endpoints(0))) {
    v1::OpenShard open;
    open.set_max_chunk_bytes(transfer->options_.max_chunk_bytes_down);
    open.set_with_crc32c(transfer->options_.with_crc32c);
    open.set_token(ticket.token());
    open.set_part(part);
    open.set_parts(parts);
    open.set_writer(transfer->options_.writer);
    wire::PutOpenShard(open, context_.get());
    context_->set_deadline(transfer->options_.deadline);
  }

  // `keeper`: the transfer, kept until the stream has ended. The first chunk is sent together with
  // the call.
  void Start(std::shared_ptr<DirectTransfer> keeper) {
    keeper_ = std::move(keeper);
    stub_->PrepareBidiStreamingCall(context_.get(), kExchange, {}, this);
    WriteNext();
    StartRead(&read_buffer_);
    StartCall();
  }

  void Cancel() {
    const std::lock_guard lock(mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }

  bool opened() const { return opened_.load(); }
  const std::string& worker() const { return worker_; }
  bool IsConnected() {
    const std::lock_guard lock(mutex_);
    return channel_ == nullptr || channel_->GetState(false) == GRPC_CHANNEL_READY;
  }

 private:
  void OnWriteDone(bool ok) override {
    if (!ok) return;  // the stream has ended; OnDone has the reason
    WriteNext();
    transfer_->OnMoved();
  }

  void WriteNext() {
    std::optional<ShardTensors::Chunk> chunk = transfer_->tensors_->Next(rank_);
    // The stream is not half-closed: other streams may carry the rest of the shard.
    if (!chunk) return;
    wire::ChunkHeader header{.tensor = chunk->tensor, .offset = chunk->offset};
    if (transfer_->options_.with_crc32c) {
      uint32_t crc = 0;
      for (const ConstBytes& piece : chunk->pieces) {
        crc = wire::ExtendCrc32c(crc, piece.data(), piece.size());
      }
      header.crc32c = crc;
    }
    const uint64_t bytes = chunk->bytes;
    write_buffer_ = wire::MakeChunkBuffer(
        wire::EncodeChunkPrefix(wire::kExchangeRequest, header, bytes), SlicesOf(*chunk));
    StartWrite(&write_buffer_);
  }

  std::vector<grpc::Slice> SlicesOf(ShardTensors::Chunk& chunk) {
    if (uint8_t* const own = chunk.gathered.release(); own != nullptr) {
      return {wire::BorrowSlice(
          own, chunk.bytes, [](void* gathered) { delete[] static_cast<uint8_t*>(gathered); }, own)};
    }
    std::vector<grpc::Slice> slices;
    for (const ConstBytes& piece : chunk.pieces) {
      transfer_->borrowed_->fetch_add(1);
      slices.push_back(wire::BorrowSlice(
          piece.data(), piece.size(),
          [](void* borrowed) { static_cast<std::atomic<int64_t>*>(borrowed)->fetch_sub(1); },
          transfer_->borrowed_));
    }
    return slices;
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (absl::Status status = TakeMessage(); !status.ok()) {
      failure_ = std::move(status);
      return Cancel();
    }
    StartRead(&read_buffer_);
  }

  absl::Status TakeMessage() {
    const auto message = wire::ReceivedMessage::Parse(wire::kExchangeResponse, read_buffer_);
    if (!message.ok()) return WorkerError(message.status().message());
    if (message->is_chunk()) {
      if (!opened() || done_) return WorkerError("a chunk before ShardOpened or after ShardDone");
      absl::Status status = transfer_->tensors_->Add(rank_, message->chunk(), message->payload(),
                                                     message->payload_bytes());
      if (!status.ok()) return status;
      int64_t never = 0;
      transfer_->first_output_at_.compare_exchange_strong(never, Now());
      transfer_->OnMoved();
      return absl::OkStatus();
    }
    auto response = wire::ParseProto<v1::ExchangeResponse>(&read_buffer_);
    if (!response.ok()) return WorkerError(response.status().message());
    if (response->has_opened() && !opened_.exchange(true)) {
      transfer_->OnStreamOpened();
      transfer_->OnMoved();  // also if nothing, or everything, was sent together with the call
    }
    done_ = done_ || response->has_done();
    return absl::OkStatus();
  }

  void OnDone(const grpc::Status& status) override {
    absl::Status end = failure_.ok() ? FromGrpcStatus(status) : failure_;
    if (end.ok() && !done_) end = WorkerError("a stream ended without ShardDone");
    write_buffer_.Clear();
    read_buffer_.Clear();
    {
      // The context holds the call, which holds the slices that were not sent. The client shares
      // the channels, so this does not drop their last reference.
      const std::lock_guard lock(mutex_);
      context_.reset();
      stub_.reset();
      channel_.reset();
    }
    const std::shared_ptr<DirectTransfer> keeper = std::move(keeper_);
    keeper->OnStreamEnded(end, opened(), worker_);
  }

  DirectTransfer* const transfer_;
  std::shared_ptr<grpc::Channel> channel_;
  std::optional<grpc::GenericStub> stub_;
  const int rank_;
  const std::string worker_;
  std::shared_ptr<DirectTransfer> keeper_;

  grpc::ByteBuffer write_buffer_;  // writing side

  grpc::ByteBuffer read_buffer_;  // reading side, as the next two
  absl::Status failure_;
  bool done_ = false;
  std::atomic<bool> opened_{false};

  std::mutex mutex_;  // guards context_ and channel_; both are null once the stream has ended
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();
};

int DirectTransfer::StreamsFor(uint64_t bytes, int channels) {
  return static_cast<int>(
      std::clamp<uint64_t>(bytes / kLeastBytesPerStream, 1, static_cast<uint64_t>(channels)));
}

DirectTransfer::DirectTransfer(const v1::Accepted& accepted, std::unique_ptr<ShardTensors> tensors,
                               WorkerChannels* workers, DirectTransferOptions options,
                               DirectTransferEvents events, std::atomic<int64_t>* borrowed)
    : options_(std::move(options)),
      events_(std::move(events)),
      tensors_(std::move(tensors)),
      borrowed_(borrowed) {
  for (int rank = 0; rank < tensors_->ranks(); ++rank) {
    const v1::ShardTicket& ticket = accepted.tickets(rank);
    const WorkerChannels::Channels channels = workers->To(ticket.endpoints(0), tensors_->ranks());
    const int parts = StreamsFor(tensors_->bytes_up(rank) + tensors_->bytes_down(rank),
                                 static_cast<int>(channels.size()));
    for (int part = 0; part < parts; ++part) {
      streams_.push_back(std::make_shared<Stream>(this, channels[part], ticket, part, parts));
    }
  }
  unopened_ = unended_ = streams_.size();
}

DirectTransfer::~DirectTransfer() = default;

void DirectTransfer::Start() {
  // Keeps this alive if a stream ends at once, so that the others start too.
  const std::shared_ptr<DirectTransfer> self = shared_from_this();
  WatchOpening(std::chrono::milliseconds(absl::ToInt64Milliseconds(options_.connect_timeout)),
               /*only_connection=*/true);
  for (const std::shared_ptr<Stream>& stream : streams_) stream->Start(self);
  if (cancelled_) Cancel();
}

void DirectTransfer::Cancel() {
  cancelled_ = true;
  for (const std::shared_ptr<Stream>& stream : streams_) stream->Cancel();
}

double DirectTransfer::uploaded_seconds(std::chrono::steady_clock::time_point start) const {
  return SecondsBetween(start, uploaded_at_.load());
}

double DirectTransfer::first_output_seconds(std::chrono::steady_clock::time_point start) const {
  return SecondsBetween(start, first_output_at_.load());
}

void DirectTransfer::OnMoved() {
  const uint64_t dealt = tensors_->dealt_bytes();
  if (dealt == tensors_->bytes_up()) {
    int64_t never = 0;
    uploaded_at_.compare_exchange_strong(never, Now());
  }
  events_.on_moved(dealt, tensors_->received_bytes());
}

void DirectTransfer::OnStreamOpened() {
  if (unopened_.fetch_sub(1) == 1) StopWatching();
}

void DirectTransfer::OnStreamEnded(const absl::Status& status, bool opened,
                                   const std::string& worker) {
  if (!status.ok()) {
    // The connection failed, or the worker did not answer on it.
    const bool unreachable = !opened && absl::IsUnavailable(status);
    Break(WithMessage(status, absl::StrCat(worker, ": ", status.message())), unreachable);
  }
  if (unended_.fetch_sub(1) > 1) return;
  StopWatching();
  events_.on_ended();
}

void DirectTransfer::Break(const absl::Status& why, bool unreachable) {
  if (cancelled_ || broken_.exchange(true)) return;
  events_.on_broken(why, unreachable);
}

// --- Detection of workers that do not answer --------------------------------------

void DirectTransfer::WatchOpening(std::chrono::milliseconds wait, bool only_connection) {
  const std::lock_guard lock(watch_mutex_);
  if (!watched_) return;
  watch_.emplace();
  watch_->Set(std::chrono::system_clock::now() + wait,
              [self = shared_from_this(), only_connection](bool in_time) {
                if (in_time) self->CheckOpening(only_connection);
              });
}

void DirectTransfer::CheckOpening(bool only_connection) {
  for (const std::shared_ptr<Stream>& stream : streams_) {
    if (stream->opened() || (only_connection && stream->IsConnected())) continue;
    const std::string why = only_connection
                                ? absl::StrCat(" did not accept a connection within ",
                                               absl::FormatDuration(options_.connect_timeout))
                                : " did not answer in time";
    return Break(absl::UnavailableError(absl::StrCat(stream->worker(), why)),
                 /*unreachable=*/true);
  }
  if (only_connection && unopened_ > 0) WatchOpening(kAnswerTimeout, /*only_connection=*/false);
}

void DirectTransfer::StopWatching() {
  const std::lock_guard lock(watch_mutex_);
  watched_ = false;
  watch_.reset();  // it refers to this
}

}  // namespace ringattn::client
