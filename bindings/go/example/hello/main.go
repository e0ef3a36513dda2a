// KV that survives a restart. Run it twice: the first run stores the KV of a prompt, the second one loads it.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	"kvtier"
)

const layers, heads, dim, tokens, plane = 4, 2, 64, 96, 96 * 2 * 64 * 2 // plane: bytes of K of a layer

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	store := must(kvtier.Open(`store(host=64MiB, disk=disk(path="hello-kv", bytes=256MiB))`))
	layout := must(kvtier.LayoutGQA(layers, heads, dim, kvtier.F16, 32))
	namespace := must(store.Namespace(kvtier.Identity{Model: "hello", Weights: "v1"}, layout))
	session := must(namespace.Session("hello", 0))
	for i := uint32(0); i < tokens; i++ { // token ids: they name the KV
		must(0, session.Append(1000+i))
	}
	tensors := must(store.Runtime().Buffer(2 * layers * plane)) // of the engine: K and V of each layer
	var all kvtier.Transfer
	for i := 0; i < 2*layers; i += 2 {
		all.K = append(all.K, kvtier.View{Buffer: tensors, Offset: i * plane, Heads: heads, RunBytes: dim * 2})
		all.V = append(all.V, kvtier.View{Buffer: tensors, Offset: (i + 1) * plane, Heads: heads, RunBytes: dim * 2})
	}
	loaded, err := must(session.Get(all)).Wait(context.Background())
	if errors.Is(err, kvtier.NotFound) { // the engine computes the KV
		for i := range tensors.Bytes() {
			tensors.Bytes()[i] = 7
		}
		all.Level = kvtier.Durable
		fmt.Println("stored", must(must(session.Put(all)).Wait(context.Background())), "tokens")
	} else {
		fmt.Println("loaded", must(loaded, err), "tokens, the last byte is", tensors.Bytes()[2*layers*plane-1])
	}
	must(0, tensors.Close())
	must(0, session.Close())
	must(0, namespace.Close())
	must(0, store.Close(0))
}
