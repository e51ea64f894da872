#include "client/cli/attention_file.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/transfer/tensor_bytes.h"
#include "common/attention/dtype.h"
#include "common/wire/proto_values.h"

namespace ringattn::client::cli {
namespace {

absl::Status Wrong(const std::string& path, absl::string_view tensor, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": tensor \"", tensor, "\" ", what));
}

std::string Dimensions(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

FileDType FileDTypeOf(const Problem& problem, v1::TensorId tensor) {
  v1::DataType dtype = problem.dtype;
  switch (InfoOf(static_cast<TensorId>(tensor)).element) {
    case ElementOf::kInt32:
      return FileDType::kI32;
    case ElementOf::kMask:
      return problem.options.mask().encoding() == v1::MASK_ENCODING_BITS ? FileDType::kU8
                                                                         : FileDType::kBool;
    case ElementOf::kBias:
      if (problem.options.bias().has_dtype()) dtype = problem.options.bias().dtype();
      break;
    case ElementOf::kFloat32:
      dtype = v1::DATA_TYPE_FLOAT32;
      break;
    case ElementOf::kResult:
      if (problem.output_dtype != v1::DATA_TYPE_UNSPECIFIED) dtype = problem.output_dtype;
      break;
    case ElementOf::kRequest:
      break;
  }
  if (dtype == v1::DATA_TYPE_FLOAT32) return FileDType::kF32;
  return dtype == v1::DATA_TYPE_BFLOAT16 ? FileDType::kBF16 : FileDType::kF16;
}

// The flag that enables a tensor.
absl::string_view FlagOf(const TensorInfo& info) {
  return info.element == ElementOf::kInt32 ? "segment_ids" : info.name;
}

constexpr char kSlopes[] = "alibi_slopes";

absl::StatusOr<v1::DataType> DTypeOfFile(const std::string& path, const TensorView& tensor) {
  switch (tensor.dtype) {
    case FileDType::kF32:
      return v1::DATA_TYPE_FLOAT32;
    case FileDType::kBF16:
      return v1::DATA_TYPE_BFLOAT16;
    case FileDType::kF16:
      return v1::DATA_TYPE_FLOAT16;
    default:
      return Wrong(path, tensor.name,
                   absl::StrCat("is ", FileDTypeName(tensor.dtype), ", not F32, BF16 or F16"));
  }
}

absl::StatusOr<const TensorView*> Require(const std::string& path, const SafetensorsFile& file,
                                          absl::string_view name) {
  const TensorView* tensor = file.Find(name);
  if (tensor == nullptr) return Wrong(path, name, "is missing");
  return tensor;
}

absl::Status ReadCuSeqlens(const std::string& path, const SafetensorsFile& file,
                           absl::string_view name,
                           google::protobuf::RepeatedField<uint64_t>* values) {
  const TensorView* tensor = file.Find(name);
  if (tensor == nullptr) {
    return Wrong(path, name, "is missing; tensors of three dimensions are packed and need it");
  }
  if (tensor->dtype != FileDType::kI32 || tensor->shape.size() != 1) {
    return Wrong(path, name, "must be I32 or I64 of one dimension");
  }
  for (int64_t i = 0; i < tensor->shape[0]; ++i) {
    int32_t value;
    std::memcpy(&value, tensor->data + i * sizeof(value), sizeof(value));
    if (value < 0) return Wrong(path, name, absl::StrCat("has ", value, " at ", i));
    values->Add(static_cast<uint64_t>(value));
  }
  return absl::OkStatus();
}

// Converts an I64 tensor of the file to I32.
absl::Status NarrowIntegers(const std::string& path, const TensorView& view,
                            SafetensorsFile* file) {
  const int64_t count = view.bytes / static_cast<int64_t>(sizeof(int64_t));
  auto narrow = std::make_unique<uint8_t[]>(count * sizeof(int32_t));
  for (int64_t i = 0; i < count; ++i) {
    int64_t value;
    std::memcpy(&value, view.data + i * sizeof(value), sizeof(value));
    if (value < std::numeric_limits<int32_t>::min() ||
        value > std::numeric_limits<int32_t>::max()) {
      return Wrong(path, view.name, absl::StrCat("has ", value, " at ", i, "; it must fit int32"));
    }
    const auto id = static_cast<int32_t>(value);
    std::memcpy(narrow.get() + i * sizeof(id), &id, sizeof(id));
  }
  file->SetElements(view.name, FileDType::kI32, std::move(narrow));
  return absl::OkStatus();
}

// Heads and dimensions are uint32 in the protocol.
absl::StatusOr<uint32_t> Narrow(const std::string& path, const TensorView& tensor, int axis) {
  const int64_t value = tensor.shape[tensor.shape.size() + axis];
  if (value > std::numeric_limits<uint32_t>::max()) {
    return Wrong(path, tensor.name,
                 absl::StrCat("has an unusable shape ", Dimensions(tensor.shape)));
  }
  return static_cast<uint32_t>(value);
}

// Determines how q, k and v are packed from the tensors in the file. A tensor that appears in two
// forms is an error.
absl::StatusOr<v1::Packing> PackingOf(const std::string& path, const SafetensorsFile& file) {
  const auto refuse = [&](const char* packed, std::initializer_list<const char*> others) {
    for (const char* other : others) {
      if (file.Find(other) == nullptr) continue;
      return Wrong(path, other, absl::StrCat("cannot be combined with \"", packed, "\""));
    }
    return absl::OkStatus();
  };
  if (file.Find("qkv") != nullptr) {
    if (absl::Status status = refuse("qkv", {"q", "k", "v", "kv"}); !status.ok()) return status;
    return v1::PACKING_QKV;
  }
  if (file.Find("kv") != nullptr) {
    if (absl::Status status = refuse("kv", {"k", "v"}); !status.ok()) return status;
    return v1::PACKING_KV;
  }
  return v1::PACKING_UNSPECIFIED;
}

std::vector<const char*> NamesOf(v1::Packing packing) {
  if (packing == v1::PACKING_QKV) return {"qkv"};
  if (packing == v1::PACKING_KV) return {"q", "kv"};
  return {"q", "k", "v"};
}

bool IsPacked(const TensorView& view) { return view.name == "qkv" || view.name == "kv"; }

// Number of axes without the packing axis: 4, or 3 for packed documents.
size_t AxesOf(const TensorView& view) { return view.shape.size() - (IsPacked(view) ? 1 : 0); }

int64_t TokensOf(const TensorView& view) {
  return view.shape[view.shape.size() - (IsPacked(view) ? 4 : 3)];
}

absl::Status CheckLikeFirst(const std::string& path, const TensorView& view,
                            const std::vector<const TensorView*>& others) {
  if (view.shape.size() < 3 || (AxesOf(view) != 3 && AxesOf(view) != 4)) {
    return Wrong(path, view.name,
                 absl::StrCat("has shape ", Dimensions(view.shape),
                              IsPacked(view) ? "; five dimensions, or four"
                                             : "; four dimensions, "
                                               "or three",
                              " when packed"));
  }
  if (others.empty()) return absl::OkStatus();
  const TensorView& first = *others.front();
  if (view.dtype != first.dtype) {
    return Wrong(path, view.name,
                 absl::StrCat("is ", FileDTypeName(view.dtype), ", ", first.name, " is ",
                              FileDTypeName(first.dtype)));
  }
  if (AxesOf(view) == AxesOf(first)) return absl::OkStatus();
  return Wrong(path, view.name, absl::StrCat("must have as many dimensions as ", first.name));
}

// Determines from the shape [batch or 1, heads or 1, ...] along which axes a bias or mask varies.
template <typename Form>
absl::StatusOr<const TensorView*> ReadForm(const std::string& path, const SafetensorsFile& file,
                                           const char* name, Form* form) {
  const TensorView* view = file.Find(name);
  if (view == nullptr) return Wrong(path, name, absl::StrCat("is missing; --", name, " needs it"));
  if (view->shape.size() != 4) {
    return Wrong(path, name,
                 absl::StrCat("has shape ", Dimensions(view->shape), "; four dimensions"));
  }
  form->set_per_batch(view->shape[0] != 1);
  form->set_per_head(view->shape[1] != 1);
  return view;
}

absl::Status ReadSlopes(const std::string& path, const SafetensorsFile& file, Problem* problem) {
  const TensorView* view = file.Find(kSlopes);
  if (!problem->options.has_alibi() || problem->geometric_slopes) {
    if (view != nullptr) {
      return Wrong(path, kSlopes,
                   problem->geometric_slopes
                       ? "is given, but --alibi=geometric computes slopes; pass --alibi to use it"
                       : "is given without --alibi");
    }
    if (problem->geometric_slopes) {
      SetGeometricSlopes(problem->shape.num_heads(), &problem->options);
    }
    return absl::OkStatus();
  }
  if (view == nullptr) {
    return Wrong(path, kSlopes, "is missing; --alibi needs it (--alibi=geometric computes slopes)");
  }
  if (view->dtype != FileDType::kF32 || view->shape.empty() || view->shape.size() > 2) {
    return Wrong(path, kSlopes, "must be F32 [heads] or [batch, heads]");
  }
  // The same number of values in another shape would be the slopes of other heads.
  const v1::AttentionShape& shape = problem->shape;
  const int64_t heads = shape.num_heads();
  const auto rows = static_cast<int64_t>(shape.has_packed() ? shape.packed().cu_seqlens_q_size() - 1
                                                            : shape.batch());
  if (view->shape.back() != heads || (view->shape.size() == 2 && view->shape[0] != rows)) {
    return Wrong(path, kSlopes,
                 absl::StrCat("has shape ", Dimensions(view->shape), "; it must be [", heads,
                              "] or [", rows, ", ", heads, "]"));
  }
  for (int64_t i = 0; i < view->bytes / 4; ++i) {
    float slope;
    std::memcpy(&slope, view->data + 4 * i, 4);
    problem->options.mutable_alibi()->add_slopes(slope);
  }
  return absl::OkStatus();
}

// Completes the options that follow from the file's tensors.
absl::Status ReadTermForms(const std::string& path, const SafetensorsFile& file, Problem* problem) {
  if (problem->options.has_bias()) {
    const auto view = ReadForm(path, file, "bias", problem->options.mutable_bias());
    if (!view.ok()) return view.status();
    // If the type differs from the request's, it can only be fp32; ReadTensor checks this.
    if ((*view)->dtype == FileDType::kF32 && problem->dtype != v1::DATA_TYPE_FLOAT32) {
      problem->options.mutable_bias()->set_dtype(v1::DATA_TYPE_FLOAT32);
    }
  }
  if (problem->options.has_mask()) {
    const auto view = ReadForm(path, file, "mask", problem->options.mutable_mask());
    if (!view.ok()) return view.status();
  }
  if (problem->split_heads) {
    absl::Status status = SplitHeads(problem->shape.num_heads(), &problem->options);
    if (!status.ok()) return status;
  }
  return ReadSlopes(path, file, problem);
}

}  // namespace

absl::Status ConvertTensors(const std::string& path, SafetensorsFile* file) {
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k", "q_segment_ids", "kv_segment_ids"}) {
    const TensorView* view = file->Find(name);
    if (view == nullptr || view->dtype != FileDType::kI64) continue;
    if (absl::Status status = NarrowIntegers(path, *view, file); !status.ok()) return status;
  }
  const TensorView* sinks = file->Find(TensorIdName(v1::TENSOR_ID_SINKS));
  if (sinks == nullptr || (sinks->dtype != FileDType::kBF16 && sinks->dtype != FileDType::kF16)) {
    return absl::OkStatus();
  }
  const int64_t count = sinks->bytes / FileDTypeBytes(sinks->dtype);
  auto wide = std::make_unique<uint8_t[]>(count * sizeof(float));
  ConvertToFloat(sinks->dtype == FileDType::kBF16 ? DType::kBFloat16 : DType::kFloat16, sinks->data,
                 reinterpret_cast<float*>(wide.get()), count);
  file->SetElements(sinks->name, FileDType::kF32, std::move(wide));
  return absl::OkStatus();
}

absl::Status ReadShape(const std::string& path, const SafetensorsFile& file, Problem* problem) {
  v1::AttentionShape& shape = problem->shape;
  const auto packing = PackingOf(path, file);
  if (!packing.ok()) return packing.status();
  shape.set_packing(*packing);
  std::vector<const TensorView*> views;
  for (const char* name : NamesOf(*packing)) {
    const auto view = Require(path, file, name);
    if (!view.ok()) return view.status();
    if (absl::Status status = CheckLikeFirst(path, **view, views); !status.ok()) return status;
    views.push_back(*view);
  }
  const TensorView& q = *views.front();
  const TensorView& k = *views[std::min<size_t>(1, views.size() - 1)];
  const TensorView& v = *views.back();
  const auto dtype = DTypeOfFile(path, q);
  if (!dtype.ok()) return dtype.status();
  problem->dtype = *dtype;

  const bool packed = AxesOf(q) == 3;
  shape.set_batch(packed ? 1 : q.shape[0]);
  shape.set_seq_len_q(TokensOf(q));
  shape.set_seq_len_kv(TokensOf(k));
  const std::pair<void (v1::AttentionShape::*)(uint32_t), std::pair<const TensorView*, int>>
      narrow[] = {{&v1::AttentionShape::set_num_heads, {&q, -2}},
                  {&v1::AttentionShape::set_num_kv_heads, {&k, -2}},
                  {&v1::AttentionShape::set_head_dim, {&q, -1}},
                  {&v1::AttentionShape::set_head_dim_v, {&v, -1}}};
  for (const auto& [set, from] : narrow) {
    const auto value = Narrow(path, *from.first, from.second);
    if (!value.ok()) return value.status();
    (shape.*set)(*value);
  }
  if (packed) {
    absl::Status status =
        ReadCuSeqlens(path, file, "cu_seqlens_q", shape.mutable_packed()->mutable_cu_seqlens_q());
    if (!status.ok()) return status;
    status =
        ReadCuSeqlens(path, file, "cu_seqlens_k", shape.mutable_packed()->mutable_cu_seqlens_k());
    if (!status.ok()) return status;
  }
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) {
    if (packed || file.Find(name) == nullptr) continue;
    return Wrong(path, name,
                 absl::StrCat("needs packed documents, but ", q.name, " has ", q.shape.size(),
                              " dimensions"));
  }
  // Dimensions that q does not determine must agree between k and v, the others with q.
  for (const TensorView* view : views) {
    const std::optional<TensorId> id = TensorFromName(view->name);
    if (*id == TensorId::kQ) continue;
    const auto bytes = ReadTensor(path, file, *problem, ToProto(*id));
    if (!bytes.ok()) return bytes.status();
  }
  return ReadTermForms(path, file, problem);
}

bool TravelsAlone(const Problem& problem, v1::TensorId tensor) {
  AttentionSpec spec;
  spec.shape.packing = FromProto(problem.shape.packing()).value_or(Packing::kNone);
  const auto id = static_cast<TensorId>(tensor);
  return ClientTensorOf(spec, id) == id;
}

absl::StatusOr<ConstBytes> ReadTensor(const std::string& path, const SafetensorsFile& file,
                                      const Problem& problem, v1::TensorId tensor) {
  const TensorView* view = file.Find(TensorIdName(tensor));
  if (view == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(path, ": tensor \"", TensorIdName(tensor), "\" is missing"));
  }
  const FileDType dtype = FileDTypeOf(problem, tensor);
  if (view->dtype != dtype) {
    return Wrong(
        path, view->name,
        absl::StrCat("is ", FileDTypeName(view->dtype), " and must be ", FileDTypeName(dtype)));
  }
  const auto dimensions = TensorDimensions(problem.shape, problem.types(), tensor, problem.options);
  if (!dimensions.ok()) return dimensions.status();
  const std::vector<int64_t>& expected = *dimensions;
  if (!std::equal(view->shape.begin(), view->shape.end(), expected.begin(), expected.end())) {
    return Wrong(path, view->name,
                 absl::StrCat("has shape ", Dimensions(view->shape),
                              "; it must "
                              "be [",
                              absl::StrJoin(expected, ", "), "]"));
  }
  return ConstBytes(view->data, view->bytes);
}

absl::StatusOr<TensorMap<ConstBytes>> ReadOptionTensors(const std::string& path,
                                                        const SafetensorsFile& file,
                                                        const Problem& problem,
                                                        Direction direction) {
  const auto spec =
      SpecForTensors(problem.shape, problem.types(), problem.options, problem.has_dlse);
  if (!spec.ok()) return spec.status();
  TensorMap<ConstBytes> tensors;
  for (const TensorInfo& info : AllTensors()) {
    const TensorUse use = direction == Direction::kForward ? info.forward : info.backward;
    if (info.is_present == nullptr || use != TensorUse::kInput) continue;
    if (!info.is_present(*spec)) {
      if (file.Find(info.name) == nullptr) continue;
      return Wrong(path, info.name, absl::StrCat("is given without --", FlagOf(info)));
    }
    const auto bytes = ReadTensor(path, file, problem, static_cast<v1::TensorId>(info.id));
    if (absl::IsNotFound(bytes.status())) {
      return Wrong(path, info.name, absl::StrCat("is missing; --", FlagOf(info), " needs it"));
    }
    if (!bytes.ok()) return bytes.status();
    tensors[static_cast<v1::TensorId>(info.id)] = *bytes;
  }
  return tensors;
}

absl::StatusOr<std::vector<v1::TensorId>> OutputsOfProblem(const Problem& problem,
                                                           Direction direction) {
  const auto spec =
      SpecForTensors(problem.shape, problem.types(), problem.options, problem.has_dlse);
  if (!spec.ok()) return spec.status();
  std::vector<v1::TensorId> outputs;
  for (TensorId id : OutputsOf(*spec, direction)) {
    outputs.push_back(static_cast<v1::TensorId>(id));
  }
  return outputs;
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> CreateFor(
    const std::string& path, const Problem& problem, const std::vector<v1::TensorId>& tensors,
    bool with_cu_seqlens, bool with_slopes) {
  std::vector<TensorDeclaration> declarations;
  for (const v1::TensorId tensor : tensors) {
    auto dimensions = TensorDimensions(problem.shape, problem.types(), tensor, problem.options);
    if (!dimensions.ok()) return dimensions.status();
    declarations.push_back(
        {TensorIdName(tensor), FileDTypeOf(problem, tensor), *std::move(dimensions)});
  }
  const auto& slopes = problem.options.alibi().slopes();
  if (with_slopes) declarations.push_back({kSlopes, FileDType::kF32, {slopes.size()}});
  with_cu_seqlens = with_cu_seqlens && problem.shape.has_packed();
  const v1::PackedDocuments& packed = problem.shape.packed();
  const std::pair<const char*, const google::protobuf::RepeatedField<uint64_t>*> lists[] = {
      {"cu_seqlens_q", &packed.cu_seqlens_q()}, {"cu_seqlens_k", &packed.cu_seqlens_k()}};
  if (with_cu_seqlens) {
    for (const auto& [name, values] : lists) {
      if (!values->empty() &&
          *values->rbegin() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
        return absl::InvalidArgumentError(absl::StrCat(name, " does not fit int32"));
      }
      declarations.push_back({name, FileDType::kI32, {values->size()}});
    }
  }
  auto writer = SafetensorsWriter::Create(path, std::move(declarations), {});
  if (!writer.ok()) return writer;
  if (with_slopes) {
    std::memcpy((*writer)->data(kSlopes).data(), slopes.data(), slopes.size() * sizeof(float));
  }
  if (!with_cu_seqlens) return writer;
  for (const auto& [name, values] : lists) {
    const auto target = (*writer)->data(name);
    for (int i = 0; i < values->size(); ++i) {
      const int32_t value = static_cast<int32_t>(values->Get(i));
      std::memcpy(target.data() + i * sizeof(value), &value, sizeof(value));
    }
  }
  return writer;
}

std::string ElementName(const Problem& problem, v1::TensorId tensor) {
  switch (FileDTypeOf(problem, tensor)) {
    case FileDType::kF32:
      return "fp32";
    case FileDType::kI32:
      return "int32";
    case FileDType::kBool:
      return "bool";
    case FileDType::kU8:
      return "uint8";
    default:
      return ShortName(problem.dtype);
  }
}

std::string Describe(const Problem& problem, v1::TensorId tensor) {
  return absl::StrCat(
      TensorIdName(tensor), " ", ElementName(problem, tensor), " [",
      absl::StrJoin(*TensorDimensions(problem.shape, problem.types(), tensor, problem.options),
                    ", "),
      "]");
}

}  // namespace ringattn::client::cli
