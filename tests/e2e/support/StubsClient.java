// A client with Java stubs, which test_tools.py compiles.
import io.grpc.Channel;
import io.grpc.stub.StreamObserver;
import ringattn.v1.*;

final class StubsClient {
  static ForwardRequest header() {
    return ForwardRequest.newBuilder()
        .setHeader(ForwardHeader.newBuilder()
            .setDtype(DataType.DATA_TYPE_BFLOAT16)
            .setShape(AttentionShape.newBuilder().setBatch(1).setSeqLenQ(8).setSeqLenKv(8).setNumHeads(2).setHeadDim(16))
            .setOptions(AttentionOptions.newBuilder().setCausal(true)))
        .build();
  }

  static StreamObserver<ForwardRequest> forward(Channel channel, StreamObserver<ForwardResponse> replies) {
    return AttentionServiceGrpc.newStub(channel).forward(replies);
  }

  static KvCacheServiceGrpc.KvCacheServiceBlockingStub caches(Channel channel) {
    return KvCacheServiceGrpc.newBlockingStub(channel);
  }
}
