#include "common/request/transport_rules.h"

#include <google/protobuf/text_format.h>

#include <limits>

#include "common/request/validation.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// q and out have 2 * 4 * 8 * 4 = 256 bytes, k and v 128, lse 32.
constexpr char kHeader[] = R"(
  shape { batch: 1 seq_len_q: 2 seq_len_kv: 4 num_heads: 4 num_kv_heads: 1 head_dim: 8 }
  dtype: DATA_TYPE_FLOAT32)";
constexpr char kPlaces[] = R"(
  transport { accept: TRANSPORT_HOST_MEMORY
    places { tensor: TENSOR_ID_Q region_id: '0123456789abcdef' offset: 0 }
    places { tensor: TENSOR_ID_K region_id: '0123456789abcdef' offset: 256 }
    places { tensor: TENSOR_ID_V region_id: '0123456789abcdef' offset: 384 }
    places { tensor: TENSOR_ID_OUT region_id: '0123456789abcdef' offset: 512 }
    places { tensor: TENSOR_ID_LSE region_id: '0123456789abcdef' offset: 768 } })";

v1::ForwardHeader Header(const std::string& more) {
  v1::ForwardHeader header;
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(kHeader, &header));
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(more, &header)) << more;
  return header;
}

TransportChoice Accepted(const v1::ForwardHeader& header) {
  const auto result = ValidateRequest(header, Limits());
  const auto* valid = std::get_if<ValidRequest>(&result);
  if (valid == nullptr) {
    ADD_FAILURE() << std::get<Rejection>(result).ToStatus();
    return {};
  }
  return valid->transport;
}

// The field and description of the first violation.
std::string Refused(const v1::ForwardHeader& header) {
  const auto result = ValidateRequest(header, Limits());
  if (std::holds_alternative<ValidRequest>(result)) return "accepted";
  const Violation& first = std::get<Rejection>(result).violations.front();
  return first.field + ": " + first.description;
}

TEST(TransportRulesTest, WithoutOptionsNothingIsSaid) {
  EXPECT_TRUE(Accepted(Header("")).says_nothing());
}

TEST(TransportRulesTest, EveryTensorHasAPlace) {
  const TransportChoice choice = Accepted(Header(kPlaces));
  EXPECT_EQ(choice.why_not_places, "");
  ASSERT_EQ(choice.places.size(), 5u);
  EXPECT_EQ(choice.places[3].tensor, TensorId::kOut);
  EXPECT_EQ(choice.places[3].offset, 512);
  EXPECT_EQ(choice.places[3].bytes, 256);
}

TEST(TransportRulesTest, WhatHasNoPlaceIsNamed) {
  v1::ForwardHeader header = Header(kPlaces);
  header.mutable_transport()->mutable_places()->DeleteSubrange(3, 1);
  EXPECT_EQ(Accepted(header).why_not_places, "out has no location in a region");
}

TEST(TransportRulesTest, InlineTensorsTravel) {
  v1::ForwardHeader header = Header(kPlaces);
  header.add_inline_tensors()->set_tensor(v1::TENSOR_ID_K);
  header.mutable_inline_tensors(0)->set_data(std::string(128, 0));
  EXPECT_EQ(Accepted(header).why_not_places, "some of its tensors are inline");
}

TEST(TransportRulesTest, StreamsToTheWorkersNeedNoPlaces) {
  const TransportChoice choice =
      Accepted(Header("transport { accept: TRANSPORT_DIRECT required: true }"));
  EXPECT_EQ(choice.accept, std::vector{TransportKind::kDirectStream});
  EXPECT_TRUE(choice.required);
  EXPECT_EQ(choice.why_not_direct, "");
}

TEST(TransportRulesTest, InlineTensorsGoByTheCoordinator) {
  v1::ForwardHeader header = Header("transport { accept: TRANSPORT_DIRECT }");
  header.add_inline_tensors()->set_tensor(v1::TENSOR_ID_K);
  header.mutable_inline_tensors(0)->set_data(std::string(128, 0));
  EXPECT_EQ(Accepted(header).why_not_direct, "some of its tensors are inline");
}

TEST(TransportRulesTest, WhatWorkersHaveInAnotherFormGoesByTheCoordinator) {
  const auto why_not = [](const std::string& more) {
    return Accepted(Header("transport { accept: TRANSPORT_DIRECT } " + more)).why_not_direct;
  };
  EXPECT_EQ(why_not("shape { packing: PACKING_KV }"), "") << "its parts do not";
  EXPECT_EQ(why_not("reply { probability_rows { position: 0 } }"), "it asks for probabilities");
}

TEST(TransportRulesTest, InputsMayShareBytes) {
  v1::ForwardHeader header = Header(kPlaces);
  header.mutable_transport()->mutable_places(2)->set_offset(256);
  EXPECT_EQ(Accepted(header).places[2].offset, 256);
}

TEST(TransportRulesTest, OutputsShareNothing) {
  v1::ForwardHeader header = Header(kPlaces);
  header.mutable_transport()->mutable_places(3)->set_offset(511);
  EXPECT_EQ(Refused(header), "transport.places[3].offset: the location of out overlaps that of v");
  header.mutable_transport()->mutable_places(3)->set_region_id("another region!!");
  EXPECT_EQ(Refused(header), "accepted");
}

TEST(TransportRulesTest, PlacesThatOverflowAreRefused) {
  v1::ForwardHeader header = Header(kPlaces);
  header.mutable_transport()->mutable_places(0)->set_offset(std::numeric_limits<int64_t>::max() -
                                                            255);
  EXPECT_EQ(
      Refused(header),
      "transport.places[0].offset: and the 256 bytes of q exceed the largest offset of a region");
  header.mutable_transport()->mutable_places(0)->set_offset(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(
      Refused(header),
      "transport.places[0].offset: and the 256 bytes of q exceed the largest offset of a region");
}

TEST(TransportRulesTest, MistakesAreNamed) {
  EXPECT_EQ(Refused(Header("transport { required: true }")),
            "transport.required: needs transport.accept");
  EXPECT_EQ(Refused(Header("transport { accept: TRANSPORT_UNSPECIFIED }")),
            "transport.accept[0]: is not set, must be TRANSPORT_RELAY, TRANSPORT_DIRECT, "
            "TRANSPORT_HOST_MEMORY or TRANSPORT_CUDA_MEMORY");
  EXPECT_EQ(Refused(Header("transport { accept: 5 }")),
            "transport.accept[0]: is 5, must be TRANSPORT_RELAY, TRANSPORT_DIRECT, "
            "TRANSPORT_HOST_MEMORY or TRANSPORT_CUDA_MEMORY");
  EXPECT_EQ(Refused(Header("transport { accept: [2, 1, 2] }")),
            "transport.accept[2]: is given twice");
  EXPECT_EQ(Refused(Header("transport { accept: [3, 3] }")), "transport.accept[1]: is given twice");
  EXPECT_EQ(Refused(Header("transport { accept: 1 fence_number: 1 }")),
            "transport.fence_number: is of HOST_MEMORY and CUDA_MEMORY, which transport.accept "
            "does not name");
  EXPECT_EQ(
      Refused(Header("transport { accept: 1 places {} }")),
      "transport.places: are of HOST_MEMORY and CUDA_MEMORY, which transport.accept does not name");
  EXPECT_EQ(Refused(Header("transport { accept: 3 places { tensor: 99 } }")),
            "transport.places[0].tensor: names no tensor");
  EXPECT_EQ(Refused(Header("transport { accept: 3 places { tensor: TENSOR_ID_DQ } }")),
            "transport.places[0].tensor: dq is not a tensor of this request");
  EXPECT_EQ(Refused(Header("transport { accept: 3 places { tensor: TENSOR_ID_Q } }")),
            "transport.places[0].region_id: must have 16 bytes");
  v1::ForwardHeader header = Header(kPlaces);
  header.mutable_transport()->mutable_places(1)->set_tensor(v1::TENSOR_ID_Q);
  EXPECT_EQ(Refused(header), "transport.places[1].tensor: q already has a location");
}

}  // namespace
}  // namespace ringattn
