// One prompt and one decoded token in a K/V cache, by relay, with plain generated stubs.
//
//	go run ./kv_cache 127.0.0.1:7700
//
// Compares every result with attention in float64.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"math"
	"math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	ringattn "ringattn/v1"
)

const (
	heads   = 4
	kvHeads = 2
	dim     = 16
	prompt  = 20
	// A relay message has at most 16 MiB of tensors.
	maxMessageBytes = 17 << 20
)

// The rows of a tensor [tokens, heads, dim].
type tensor []float32

func random(tokens, heads int) tensor {
	values := make(tensor, tokens*heads*dim)
	for i := range values {
		values[i] = float32(rand.NormFloat64())
	}
	return values
}

func (t tensor) bytes() []byte {
	data := make([]byte, 4*len(t))
	for i, value := range t {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(value))
	}
	return data
}

func fromBytes(data []byte) tensor {
	values := make(tensor, len(data)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return values
}

// attend returns head h of the attention of one query over the first `entries` of k and v.
func attend(q, k, v tensor, h, entries int) [dim]float64 {
	at := func(t tensor, entry, d int) float64 {
		return float64(t[(entry*kvHeads+h/(heads/kvHeads))*dim+d])
	}
	weights := make([]float64, entries)
	sum := 0.0
	for j := range weights {
		score := 0.0
		for d := 0; d < dim; d++ {
			score += float64(q[h*dim+d]) * at(k, j, d)
		}
		weights[j] = math.Exp(score / math.Sqrt(dim))
		sum += weights[j]
	}
	var out [dim]float64
	for j, weight := range weights {
		for d := range out {
			out[d] += weight / sum * at(v, j, d)
		}
	}
	return out
}

// The K and V of the sequence, as the cache holds them.
type content struct{ k, v tensor }

// step sends one step of `tokens` new tokens and compares its result.
func step(stream ringattn.KvCacheService_StepsClient, number uint64, cache *content, tokens int) error {
	length := len(cache.k) / (kvHeads * dim)
	begin := &ringattn.StepBegin{Step: number, Rows: []*ringattn.StepRow{{
		Sequence: 1, ExpectedLength: uint64(length), KeepLength: uint64(length),
		AppendTokens: uint32(tokens), QTokens: uint32(tokens)}}}
	q, k, v := random(tokens, heads), random(tokens, kvHeads), random(tokens, kvHeads)
	call := &ringattn.LayerCall{Step: number, Layer: 0, Q: q.bytes(), K: k.bytes(), V: v.bytes()}
	// Both messages together save a round trip.
	if err := stream.Send(&ringattn.StepRequest{Message: &ringattn.StepRequest_Begin{Begin: begin}}); err != nil {
		return err
	}
	if err := stream.Send(&ringattn.StepRequest{Message: &ringattn.StepRequest_Call{Call: call}}); err != nil {
		return err
	}
	answer, err := stream.Recv()
	if err != nil {
		return err
	}
	if answer.GetAccepted() == nil {
		return fmt.Errorf("step %d was refused: %v", number, answer.GetRefused())
	}
	if answer, err = stream.Recv(); err != nil {
		return err
	}
	cache.k, cache.v = append(cache.k, k...), append(cache.v, v...)
	out := fromBytes(answer.GetResult().GetOut())
	if len(out) != len(q) {
		return fmt.Errorf("out has %d elements; %d are expected", len(out), len(q))
	}
	for i := 0; i < tokens; i++ {
		for h := 0; h < heads; h++ {
			want := attend(q[i*heads*dim:(i+1)*heads*dim], cache.k, cache.v, h, length+i+1)
			for d, expected := range want {
				if got := float64(out[(i*heads+h)*dim+d]); !(math.Abs(got-expected) < 1e-4) {
					return fmt.Errorf("token %d, head %d, element %d: %v; %v is expected", i, h, d, got, expected)
				}
			}
		}
	}
	return nil
}

// run creates a cache, sends two steps and deletes the cache.
func run(ctx context.Context, address string) error {
	connection, err := grpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)))
	if err != nil {
		return err
	}
	defer connection.Close()
	service := ringattn.NewKvCacheServiceClient(connection)
	cache, err := service.CreateCache(ctx, &ringattn.CreateCacheRequest{Spec: &ringattn.KvCacheSpec{
		Groups: []*ringattn.KvLayerGroup{{Layers: []uint32{0}, NumHeads: heads, NumKvHeads: kvHeads, HeadDim: dim}},
		Dtype:  ringattn.DataType_DATA_TYPE_FLOAT32, Blocks: 16}})
	if err != nil {
		return err
	}
	defer service.DeleteCache(ctx, &ringattn.DeleteCacheRequest{CacheId: cache.CacheId})
	opened, err := service.OpenCache(ctx, &ringattn.OpenCacheRequest{CacheId: cache.CacheId})
	if err != nil {
		return err
	}
	stream, err := service.Steps(ctx)
	if err != nil {
		return err
	}
	hello := &ringattn.StepHello{CacheId: cache.CacheId, Epoch: opened.Epoch, Token: opened.Token}
	if err := stream.Send(&ringattn.StepRequest{Message: &ringattn.StepRequest_Hello{Hello: hello}}); err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	held := &content{}
	for i, tokens := range []int{prompt, 1} {
		if err := step(stream, opened.NextStep+uint64(i), held, tokens); err != nil {
			return err
		}
	}
	return stream.CloseSend()
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: kv_cache HOST:PORT")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx, os.Args[1]); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d prompt tokens and 1 decoded token are exact\n", prompt)
}
