// Causal attention over 1,024 tokens with 8 heads. Usage: ./forward_example 127.0.0.1:7700
#include <cstdio>

#include "client/api/client.h"

int main(int argc, char** argv) {
  auto client = ringattn::client::Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:7700");
  if (!client.ok()) return 1;
  const size_t seq_len = 1024, heads = 8, head_dim = 64;
  std::vector<float> q(seq_len * heads * head_dim, 0.1f), k = q, v = q, out(q.size());
  std::vector<float> lse(heads * seq_len);

  ringattn::client::ForwardArgs args{.dtype = ringattn::v1::DATA_TYPE_FLOAT32};
  args.shape.set_batch(1);
  args.shape.set_seq_len_q(seq_len);
  args.shape.set_seq_len_kv(seq_len);
  args.shape.set_num_heads(heads);
  args.shape.set_head_dim(head_dim);
  args.options.set_causal(true);
  args.q = ringattn::client::BytesOf(q), args.k = ringattn::client::BytesOf(k),
  args.v = ringattn::client::BytesOf(v);
  auto report = (*client)->Forward(args, {.out = ringattn::client::MutableBytesOf(out),
                                          .lse = ringattn::client::MutableBytesOf(lse)});
  if (!report.ok()) return std::puts(ringattn::client::FormatError(report.status()).c_str()), 1;
  std::printf("out[0] = %g, lse of the last row = %g\n", out[0], lse[seq_len - 1]);
}
