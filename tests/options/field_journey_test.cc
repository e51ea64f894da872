// The journey of every field of a header: set, it either makes a difference at its far end
// (the kernel call, the plan, the reply) or is refused by name. None is ignored.
//
// The test finds the fields by reflection. A field that is added to the protocol fails it until its
// handling is stated here.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <set>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/plan/planner.h"
#include "gtest/gtest.h"
#include "server/core/requests/reserve_message.h"
#include "server/edge/header/header_translation.h"
#include "worker/executor/bind_call.h"
#include "worker/service/reserve_decoder.h"

namespace ringattn::tests {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr char kBase[] = R"(
  shape { batch: 2 seq_len_q: 24 seq_len_kv: 32 num_heads: 4 num_kv_heads: 2 head_dim: 16
          head_dim_v: 8 }
  dtype: DATA_TYPE_BFLOAT16
  plan { schedule: SCHEDULE_RING world_size: 2 layout: LAYOUT_ZIGZAG })";

// The handling of a field.
enum class Fate {
  kArrives,
  kRefused,
  kForward,  // arrives in a Forward; a Backward that has it is refused
};

struct Journey {
  const char* field;
  const char* text;  // merged over the base
  Fate fate = Fate::kArrives;
  const char* without = "";  // what it is compared with, merged over the base
};

// A tensor's location with the given fields, and those of its TransportOptions.
#define RINGATTN_PLACE(tensor, fields, options)                                  \
  "transport { accept: TRANSPORT_HOST_MEMORY places { tensor: TENSOR_ID_" tensor \
  " region_id: "                                                                 \
  "'0123456789abcdef' " fields " } " options " }"

// A writer with the given fields, and its spans of queries and keys.
#define RINGATTN_WRITER(fields, q, kv)                                                            \
  "request_id: 'w' transport { accept: TRANSPORT_DIRECT writer { " fields " q { " q " } kv { " kv \
  " } } }"
constexpr char kWriter[] = RINGATTN_WRITER("count: 2", "count: 12", "count: 16");

constexpr Journey kJourneys[] = {
    {"request_id", "request_id: 'mine'"},
    {"shape.batch", "shape { batch: 3 }"},
    {"shape.seq_len_q", "shape { seq_len_q: 20 }"},
    {"shape.seq_len_kv", "shape { seq_len_kv: 20 }"},
    {"shape.num_heads", "shape { num_heads: 6 }"},
    {"shape.num_kv_heads", "shape { num_kv_heads: 1 }"},
    {"shape.head_dim", "shape { head_dim: 24 }"},
    {"shape.head_dim_v", "shape { head_dim_v: 24 }"},
    {"shape.packed.cu_seqlens_q",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 4, 24] cu_seqlens_k: [0, 9, 32] } }"},
    {"shape.packed.cu_seqlens_k",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 4, 24] cu_seqlens_k: [0, 10, 32] } }"},
    {"shape.packed.options.causal",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 24] cu_seqlens_k: [0, 32] "
     "options { causal: true } } }"},
    {"shape.packed.options.window.left",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 24] cu_seqlens_k: [0, 32] "
     "options { window { left: 3 right: -1 } } } }"},
    {"shape.packed.options.window.right",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 24] cu_seqlens_k: [0, 32] "
     "options { window { left: -1 right: 3 } } } }"},
    {"shape.packing", "shape { packing: PACKING_KV head_dim_v: 16 }", Fate::kArrives,
     "shape { head_dim_v: 16 }"},
    {"dtype", "dtype: DATA_TYPE_FLOAT32"},
    {"options.softmax_scale", "options { softmax_scale: 0.75 }"},
    {"options.softcap", "options { softcap: 30 }"},
    {"options.causal", "options { causal: true }"},
    {"options.window.left", "options { window { left: 3 right: -1 } }"},
    {"options.window.right", "options { window { left: -1 right: 3 } }"},
    {"options.dropout.rate", "options { dropout { rate: 0.1 } }"},
    {"options.dropout.seed", "options { dropout { rate: 0.5 seed: 5 } }", Fate::kArrives,
     "options { dropout { rate: 0.5 } }"},
    {"options.dropout.first_batch", "options { dropout { rate: 0.5 first_batch: 5 } }",
     Fate::kArrives, "options { dropout { rate: 0.5 } }"},
    {"options.dropout.first_head", "options { dropout { rate: 0.5 first_head: 5 } }",
     Fate::kArrives, "options { dropout { rate: 0.5 } }"},
    {"options.dropout.first_query", "options { dropout { rate: 0.5 first_query: 5 } }",
     Fate::kArrives, "options { dropout { rate: 0.5 } }"},
    {"options.dropout.first_key", "options { dropout { rate: 0.5 first_key: 5 } }", Fate::kArrives,
     "options { dropout { rate: 0.5 } }"},
    {"options.alibi.slopes", "options { alibi { slopes: [0.5, 1, 2, 3] } }"},
    {"options.bias.per_batch", "options { bias { per_batch: true } }", Fate::kArrives,
     "options { bias {} }"},
    {"options.bias.per_head", "options { bias { per_head: true } }", Fate::kArrives,
     "options { bias {} }"},
    {"options.bias.dtype", "options { bias { dtype: DATA_TYPE_FLOAT32 } }", Fate::kArrives,
     "options { bias {} }"},
    {"options.bias.before_softcap", "options { bias { before_softcap: true } }", Fate::kArrives,
     "options { bias {} }"},
    {"options.bias.gradient", "options { bias { gradient: true } }", Fate::kArrives,
     "options { bias {} }"},
    {"options.mask.per_batch", "options { mask { per_batch: true } }", Fate::kArrives,
     "options { mask {} }"},
    {"options.mask.per_head", "options { mask { per_head: true } }", Fate::kArrives,
     "options { mask {} }"},
    {"options.mask.encoding", "options { mask { encoding: MASK_ENCODING_BITS } }", Fate::kArrives,
     "options { mask {} }"},
    {"options.segment_ids", "options { segment_ids {} }"},
    {"options.sinks", "options { sinks {} }"},
    {"options.dilation_levels.segment_length",
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 16 dilation_rate: 2 } }",
     Fate::kArrives,
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 } }"},
    {"options.dilation_levels.dilation_rate",
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 3 } }",
     Fate::kArrives,
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 } }"},
    {"options.dilation_levels.offset",
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 "
     "offset: 1 } }",
     Fate::kArrives,
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 } }"},
    {"options.dilation_levels.head_begin",
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 "
     "head_begin: 1 } }",
     Fate::kArrives,
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 } }"},
    {"options.dilation_levels.head_end",
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 "
     "head_end: 3 } }",
     Fate::kArrives,
     "shape { seq_len_q: 32 } options { dilation_levels { segment_length: 8 dilation_rate: 2 } }"},
    {"options.deterministic", "options { deterministic: DETERMINISM_SAME_RING }"},
    {"options.compute_dtype", "options { compute_dtype: COMPUTE_DTYPE_FLOAT8_E4M3 }",
     Fate::kForward},
    {"plan.layout", "plan { layout: LAYOUT_CONTIGUOUS }"},
    {"plan.schedule", "plan { schedule: SCHEDULE_ALL_GATHER }"},
    {"plan.world_size", "plan { world_size: 3 }"},
    {"plan.stripe", "plan { layout: LAYOUT_STRIPED stripe: 4 }"},
    {"plan.heads_per_step", "plan { schedule: SCHEDULE_ALL_GATHER heads_per_step: 1 }",
     Fate::kArrives, "plan { schedule: SCHEDULE_ALL_GATHER }"},
    {"plan.group_size", "plan { schedule: SCHEDULE_DOUBLE_RING world_size: 4 group_size: 2 }",
     Fate::kArrives, "plan { schedule: SCHEDULE_DOUBLE_RING world_size: 4 }"},
    {"plan.tuning.tile_q", "plan { tuning { tile_q: 64 } }"},
    {"plan.tuning.tile_kv", "plan { tuning { tile_kv: 64 } }"},
    {"plan.tuning.key_splits", "plan { tuning { key_splits: 2 } }"},
    {"plan.members", "plan { members: 'a' members: 'b' }"},
    {"reply.max_chunk_bytes", "reply { max_chunk_bytes: 65536 }"},
    {"reply.with_crc32c", "reply { with_crc32c: true }"},
    {"reply.progress_interval", "reply { progress_interval { seconds: 3 } }"},
    {"reply.with_timeline", "reply { with_timeline: true }"},
    {"reply.single_message", "reply { single_message: true }"},
    {"reply.lse_format",
     "shape { batch: 1 packed { cu_seqlens_q: [0, 4, 24] cu_seqlens_k: [0, 9, 32] } } "
     "reply { lse_format: LSE_FORMAT_PER_DOCUMENT }",
     Fate::kArrives,
     "shape { batch: 1 packed { cu_seqlens_q: [0, 4, 24] cu_seqlens_k: [0, 9, 32] } }"},
    {"reply.probability_rows.batch", "reply { probability_rows { batch: 1 } }", Fate::kForward,
     "reply { probability_rows {} }"},
    {"reply.probability_rows.position", "reply { probability_rows { position: 1 } }",
     Fate::kForward, "reply { probability_rows {} }"},
    {"reply.output_dtype", "reply { output_dtype: DATA_TYPE_FLOAT32 }"},
    {"inline_tensors.tensor", "inline_tensors { tensor: TENSOR_ID_DV data: 'x' }", Fate::kRefused},
    {"inline_tensors.data", "inline_tensors { tensor: TENSOR_ID_Q data: 'x' }", Fate::kRefused},
    {"transport.accept", "transport { accept: TRANSPORT_RELAY }"},
    {"transport.required", "transport { accept: TRANSPORT_HOST_MEMORY required: true }",
     Fate::kArrives, "transport { accept: TRANSPORT_HOST_MEMORY }"},
    {"transport.places.tensor", RINGATTN_PLACE("Q", "", ""), Fate::kArrives,
     RINGATTN_PLACE("K", "", "")},
    {"transport.places.region_id",
     "transport { accept: TRANSPORT_HOST_MEMORY places { tensor: TENSOR_ID_Q region_id: 'short' } "
     "}",
     Fate::kRefused},
    {"transport.places.offset", RINGATTN_PLACE("Q", "offset: 8", ""), Fate::kArrives,
     RINGATTN_PLACE("Q", "", "")},
    {"transport.places.writer", RINGATTN_PLACE("Q", "writer: 1", ""), Fate::kRefused},
    {"transport.places.fence_number", RINGATTN_PLACE("Q", "fence_number: 1", ""), Fate::kRefused},
    {"transport.fence_number", RINGATTN_PLACE("Q", "", "fence_number: 7"), Fate::kArrives,
     RINGATTN_PLACE("Q", "", "")},
    {"transport.writer.index", RINGATTN_WRITER("index: 1 count: 2", "count: 12", "count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.count", RINGATTN_WRITER("count: 3", "count: 12", "count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.q.begin", RINGATTN_WRITER("count: 2", "begin: 12 count: 12", "count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.q.count", RINGATTN_WRITER("count: 2", "count: 11", "count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.q.stride", RINGATTN_WRITER("count: 2", "count: 12 stride: 2", "count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.kv.begin", RINGATTN_WRITER("count: 2", "count: 12", "begin: 16 count: 16"),
     Fate::kArrives, kWriter},
    {"transport.writer.kv.count", RINGATTN_WRITER("count: 2", "count: 12", "count: 15"),
     Fate::kArrives, kWriter},
    {"transport.writer.kv.stride", RINGATTN_WRITER("count: 2", "count: 12", "count: 16 stride: 2"),
     Fate::kArrives, kWriter},
    {"prepare.ttl", "prepare { ttl { seconds: 5 } }", Fate::kArrives, "prepare {}"},
    // Backward's own.
    {"has_forward_result", "has_forward_result: true"},
    {"residual_handle", "residual_handle: 'r'"},
    {"has_dlse", "has_dlse: true"},
    {"keep_residual", "residual_handle: 'r' keep_residual: true", Fate::kArrives,
     "residual_handle: 'r'"},
    // Forward's own.
    {"retain.ttl", "retain { ttl { seconds: 5 } }", Fate::kArrives, "retain {}"},
};

template <typename Header>
Header Parse(const std::string& text) {
  Header header;
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(kBase, &header));
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(text, &header)) << text;
  return header;
}

// A message without fields is a leaf: its presence is what it says.
void FindLeaves(const Descriptor* type, const std::string& prefix, std::set<std::string>* leaves) {
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* field = type->field(i);
    const std::string path = prefix + field->name();
    const bool descends = field->message_type() != nullptr &&
                          field->message_type()->field_count() > 0 &&
                          field->message_type()->full_name() != "google.protobuf.Duration";
    if (descends) {
      FindLeaves(field->message_type(), path + ".", leaves);
    } else {
      leaves->insert(path);
    }
  }
}

// The inputs of the core's decision, and the choice that a member receives.
std::string TransportText(const TransportChoice& choice) {
  std::string text = absl::StrFormat("transport required %d", choice.required);
  for (TransportKind kind : choice.accept) absl::StrAppend(&text, " ", static_cast<int>(kind));
  v1::Reserve reserve;
  server::AddLocations(choice, &reserve);
  if (choice.writer.has_value()) {
    absl::StrAppend(&text, " writer ", choice.writer->index, " of ", choice.writer->count);
    TransportChoice joined;
    joined.writers = {choice.writer->rows};
    server::AddWriters(joined, &reserve);
  }
  return absl::StrCat(text, " ", reserve.ShortDebugString(), "\n");
}

std::string TermsText(const worker::ScoreTerms& terms) {
  std::string text;
  for (float slope : terms.alibi_slopes) absl::StrAppendFormat(&text, " slope %g", slope);
  if (terms.bias.has_value()) {
    absl::StrAppendFormat(&text, " bias %d %d %d %d %d", terms.bias->per_batch,
                          terms.bias->per_head, terms.bias->float32, terms.bias->before_softcap,
                          terms.bias->gradient);
  }
  if (terms.mask.has_value()) {
    absl::StrAppendFormat(&text, " mask %d %d %d", terms.mask->per_batch, terms.mask->per_head,
                          terms.mask->bits);
  }
  const DropoutForm& dropout = terms.dropout;
  absl::StrAppendFormat(&text, " ids %d dropout %d %d %d %d %d %d", terms.segment_ids,
                        dropout.threshold, dropout.seed, dropout.first_batch, dropout.first_head,
                        dropout.first_query, dropout.first_key);
  return text;
}

// The operands of a rank's kernel calls for the parts of a dilated problem.
std::string PartsText(const worker::BindContext& context) {
  std::string text;
  for (size_t i = 0; i < context.parts.size(); ++i) {
    const worker::ProblemContext& part = context.parts[i];
    absl::StrAppendFormat(&text, " part of %d/%d heads", part.problem.num_heads,
                          part.problem.num_kv_heads);
    for (int32_t head : context.dilated[i].q_heads) absl::StrAppendFormat(&text, " %d", head);
    for (const auto* pieces : {&part.q_pieces, &part.kv_pieces}) {
      for (const std::vector<Piece>& of_rank : *pieces) {
        for (const Piece& piece : of_rank) {
          absl::StrAppendFormat(&text, " %d: %d+%d*%d", piece.document, piece.position,
                                piece.length, piece.stride);
        }
      }
    }
  }
  return text;
}

// The effects of a request at the far ends: each member's kernel calls and memory, the plan, the
// reply.
std::string FarEnds(const server::HeaderRequest& request) {
  const ValidRequest& valid = request.valid;
  std::string text = absl::StrFormat(
      "id %s reply %d %d %g %d %d inline %d\n", request.request_id, request.reply.max_chunk_bytes,
      request.reply.with_crc32c, absl::ToDoubleSeconds(request.reply.progress_interval),
      request.reply.with_timeline, request.reply.single_message, request.inline_tensors->size());
  absl::StrAppend(&text, TransportText(valid.transport));
  PlannerInputs inputs;
  inputs.ready_workers = 4;
  const auto plan = PlanRequest(valid.spec, valid.direction, valid.choice, inputs);
  if (!plan.ok()) return absl::StrCat("no plan: ", plan.status().ToString());
  server::RequestArrived arrived;
  arrived.direction = valid.direction;
  arrived.recompute_forward = valid.recompute_forward;
  arrived.with_timeline = request.reply.with_timeline;
  arrived.choice = valid.choice;
  // Whom the core takes, it decides by this.
  for (const std::string& member : valid.choice.members) absl::StrAppend(&text, member, " ");
  // How long and which residual is kept or read is the core's own; what comes of it is not.
  if (valid.retain_ttl) arrived.retain = server::RequestArrived::Retain{"h", *valid.retain_ttl};
  absl::StrAppendFormat(&text, "retain %g reads '%s' keep %d inputs %d\n",
                        absl::ToDoubleSeconds(valid.retain_ttl.value_or(absl::ZeroDuration())),
                        valid.residual_handle, valid.keep_residual, valid.inputs.size());
  absl::StrAppendFormat(&text, "prepare %g\n",
                        absl::ToDoubleSeconds(valid.prepare_ttl.value_or(absl::ZeroDuration())));
  std::vector<uint32_t> members;
  for (int rank = 0; rank < plan->shards.world_size; ++rank) members.push_back(rank);
  const v1::Reserve reserve = server::MakeReserve(arrived, valid.spec, *plan, "1-1", 1, members);
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const auto decoded = worker::DecodeReserve(reserve, rank, members.size());
    if (!decoded.ok()) return absl::StrCat("not decoded: ", decoded.status().ToString());
    const worker::BindContext context(decoded->spec, decoded->plan, decoded->program);
    const worker::AttentionProblem& p = context.whole.problem;
    absl::StrAppendFormat(&text, "rank %d of %d: dtype %d batch %d heads %d/%d dims %d/%d scale %g",
                          rank, members.size(), static_cast<int>(p.dtype), p.batch, p.num_heads,
                          p.num_kv_heads, p.head_dim, p.head_dim_v, p.softmax_scale);
    absl::StrAppendFormat(&text, " softcap %g deterministic %d compute %d lse %d bands", p.softcap,
                          p.deterministic, static_cast<int>(p.compute),
                          decoded->spec.lse_per_document);
    absl::StrAppend(&text, TermsText(p.terms));
    absl::StrAppendFormat(&text, " tuning %d %d %d", p.tuning.tile_q, p.tuning.tile_kv,
                          p.tuning.key_splits);
    for (const ChosenRow& row : context.chosen) {
      absl::StrAppendFormat(&text, " chosen %d:%d", row.batch, row.row);
    }
    for (const Band& band : p.bands)
      absl::StrAppendFormat(&text, " %d..%d", band.lower, band.upper);
    for (const Piece& piece : context.whole.q_pieces[rank]) {
      absl::StrAppendFormat(&text, " q %d+%d*%d", piece.position, piece.length, piece.stride);
    }
    for (const Piece& piece : context.whole.kv_pieces[rank]) {
      absl::StrAppendFormat(&text, " kv %d+%d*%d", piece.position, piece.length, piece.stride);
    }
    absl::StrAppend(&text, PartsText(context));
    for (const BufferSpec& buffer : decoded->program.buffers) {
      absl::StrAppendFormat(&text, " %s=%d", buffer.name, buffer.bytes);
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::variant<server::HeaderRequest, Rejection> Read(const v1::ForwardHeader& header) {
  v1::ForwardRequest first;
  *first.mutable_header() = header;
  return server::ReadHeader(std::move(first), Limits());
}
std::variant<server::HeaderRequest, Rejection> Read(const v1::BackwardHeader& header) {
  v1::BackwardRequest first;
  *first.mutable_header() = header;
  return server::ReadHeader(std::move(first), Limits());
}

template <typename Header>
void ExpectJourneys() {
  std::set<std::string> leaves;
  FindLeaves(Header::descriptor(), "", &leaves);
  for (const std::string& leaf : leaves) {
    const auto* journey = std::find_if(std::begin(kJourneys), std::end(kJourneys),
                                       [&](const Journey& j) { return leaf == j.field; });
    ASSERT_NE(journey, std::end(kJourneys)) << leaf << " is a new field: what becomes of it?";
    const auto read = Read(Parse<Header>(journey->text));
    const bool forward = std::is_same_v<Header, v1::ForwardHeader>;
    if (journey->fate == Fate::kArrives || (journey->fate == Fate::kForward && forward)) {
      ASSERT_TRUE(std::holds_alternative<server::HeaderRequest>(read))
          << leaf << ": " << std::get<Rejection>(read).ToStatus();
      const std::string ends = FarEnds(std::get<server::HeaderRequest>(read));
      EXPECT_EQ(ends.find("no plan"), std::string::npos) << leaf << ": " << ends;
      const auto base = Read(Parse<Header>(journey->without));
      ASSERT_TRUE(std::holds_alternative<server::HeaderRequest>(base));
      EXPECT_NE(ends, FarEnds(std::get<server::HeaderRequest>(base))) << leaf << " is ignored";
      continue;
    }
    ASSERT_TRUE(std::holds_alternative<Rejection>(read)) << leaf << " was accepted";
    const auto& violations = std::get<Rejection>(read).violations;
    // By its own name or by that of the message that holds it.
    EXPECT_TRUE(std::any_of(violations.begin(), violations.end(),
                            [&](const Violation& v) {
                              std::string field = v.field;
                              const size_t index = field.find("[0]");
                              if (index != std::string::npos) field.erase(index, 3);
                              return leaf.rfind(field, 0) == 0;
                            }))
        << leaf << ": " << std::get<Rejection>(read).ToStatus();
  }
}

TEST(FieldJourney, EveryFieldOfAForwardHeaderArrivesOrIsRefused) {
  ExpectJourneys<v1::ForwardHeader>();
}

TEST(FieldJourney, EveryFieldOfABackwardHeaderArrivesOrIsRefused) {
  ExpectJourneys<v1::BackwardHeader>();
}

}  // namespace
}  // namespace ringattn::tests
