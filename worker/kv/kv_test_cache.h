// A small cache for the tests of this folder, and the messages of its coordinator and its writer.
#ifndef RINGATTN_WORKER_KV_KV_TEST_CACHE_H_
#define RINGATTN_WORKER_KV_KV_TEST_CACHE_H_

#include <string>
#include <vector>

#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::worker {

inline constexpr char kTestToken[] = "a token of thirty-two bytes, yes.";

// One rank, two layers, one head of dim 4 in fp32, `blocks` blocks of 16 entries: 1 KiB a block.
inline v1::KvReserve TestReserve(const std::string& id, uint64_t blocks = 8) {
  v1::KvReserve reserve;
  reserve.set_cache_id(id);
  v1::KvCacheSpec* spec = reserve.mutable_spec();
  spec->set_dtype(v1::DATA_TYPE_FLOAT32);
  spec->set_block_tokens(16);
  spec->set_blocks(blocks);
  v1::KvLayerGroup* group = spec->add_groups();
  group->add_layers(0);
  group->add_layers(1);
  group->set_num_heads(1);
  group->set_num_kv_heads(1);
  group->set_head_dim(4);
  reserve.mutable_placement()->add_members("worker-0");
  reserve.mutable_placement()->set_head_parts(1);
  reserve.mutable_placement()->set_position_parts(1);
  return reserve;
}

inline v1::KvOpen TestOpen(const std::string& id, uint64_t epoch) {
  v1::KvOpen open;
  open.set_cache_id(id);
  open.set_epoch(epoch);
  open.set_token(kTestToken);
  return open;
}

inline v1::KvSettle TestSettle(const std::string& id, uint64_t epoch, uint64_t step) {
  v1::KvSettle settle;
  settle.set_cache_id(id);
  settle.set_epoch(epoch);
  settle.set_step(step);
  return settle;
}

// One row of sequence 1: `append` entries at `length`, one query.
inline v1::StepBegin TestBegin(uint64_t step, uint64_t length, uint32_t append = 1) {
  v1::StepBegin begin;
  begin.set_step(step);
  v1::StepRow* row = begin.add_rows();
  row->set_sequence(1);
  row->set_expected_length(length);
  row->set_keep_length(length);
  row->set_append_tokens(append);
  row->set_q_tokens(1);
  return begin;
}

// Every value of v is `value`, so that out is the mean of what was appended.
inline v1::LayerCall TestCall(uint64_t step, uint32_t layer, float value, uint32_t append = 1) {
  const auto floats = [](size_t count, float of) {
    const std::vector<float> values(count, of);
    return std::string(reinterpret_cast<const char*>(values.data()), count * sizeof(float));
  };
  v1::LayerCall call;
  call.set_step(step);
  call.set_layer(layer);
  call.set_q(floats(4, 0));
  call.set_k(floats(4 * append, 0));
  call.set_v(floats(4 * append, value));
  return call;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_KV_TEST_CACHE_H_
