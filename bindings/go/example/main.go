// Keeps the KV of a conversation on disk, plans how to go on with it, and loads it again.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"kvtier"
)

const (
	layers, chunk, heads, run = 4, 16, 2, 64
	tokens                    = 96
	plane                     = tokens * heads * run
)

var layout = kvtier.Layout{ChunkTokens: chunk, Layers: layers, DType: kvtier.F16, KVHeads: heads,
	KBytes: heads * run, VBytes: heads * run}

// views are of tensors that lie one after the other: K and V of each layer.
func views(b *kvtier.Buffer) (m kvtier.Transfer) {
	for i := 0; i < layers; i++ {
		m.K = append(m.K, kvtier.View{Buffer: b, Offset: 2 * i * plane, Heads: heads, RunBytes: run})
		m.V = append(m.V, kvtier.View{Buffer: b, Offset: (2*i + 1) * plane, Heads: heads, RunBytes: run})
	}
	return m
}

// turn opens the store, and either keeps the conversation's KV or brings it back.
func turn(ctx context.Context, runtime *kvtier.Runtime, folder string, prompt []uint32) (err error) {
	store, err := runtime.OpenStore(fmt.Sprintf(
		`store(host=4MiB, disk=disk(path="%s", bytes=64MiB, segment=1MiB))`, folder))
	if err != nil {
		return err
	}
	defer func() {
		if e := store.Close(time.Minute); err == nil {
			err = e
		}
	}()
	space, err := store.Namespace(kvtier.Identity{Model: "example", Weights: "1"}, layout)
	if err != nil {
		return err
	}
	defer space.Close()
	session, err := space.Session("a conversation", 1)
	if err != nil {
		return err
	}
	defer session.Close()
	if err = session.Append(prompt...); err != nil {
		return err
	}
	plan, err := session.Plan(&kvtier.Cost{Alpha: 1e3, Beta: 1e6})
	if err != nil {
		return err
	}
	tensors, err := runtime.Buffer(2 * layers * plane)
	if err != nil {
		return err
	}
	defer tensors.Close()
	for _, part := range plan {
		fmt.Printf("  tokens %d to %d: %s\n", part.First, part.First+part.Tokens, part.StepKind)
		move := views(tensors)
		if part.StepKind == kvtier.Load {
			move.Tokens = part.Tokens
			op, err := session.Get(move)
			if err != nil {
				return err
			}
			if _, err = op.Wait(ctx); err != nil {
				return err
			}
			for i, b := range tensors.Bytes() {
				if b != byte(i*31) {
					return fmt.Errorf("byte %d is %d", i, b)
				}
			}
			fmt.Println("  loaded: every byte is as it was")
			continue
		}
		for i := range tensors.Bytes() { // the model computes
			tensors.Bytes()[i] = byte(i * 31)
		}
		move.Level = kvtier.Durable
		op, err := session.Put(move)
		if err != nil {
			return err
		}
		n, err := op.Wait(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("  computed, and %d tokens are durable\n", n)
	}
	return nil
}

// victims has a policy choose among blocks that the program keeps itself.
func victims() error {
	policy, err := kvtier.OpenPolicy("arc", kvtier.PolicyOptions{Capacity: 100})
	if err != nil {
		return err
	}
	defer policy.Close()
	for id := uint64(1); id <= 4; id++ {
		if err := policy.Insert(int64(id), kvtier.Object{ID: id, Units: 1}); err != nil {
			return err
		}
	}
	if _, err := policy.Lookup(5, 1); err != nil {
		return err
	}
	gone, _, err := policy.Evict(6, 2, 10)
	fmt.Println("  who leaves first:", gone)
	return err
}

func main() {
	folder, err := os.MkdirTemp("", "kvtier-go-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	runtime, err := kvtier.Open(2)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	prompt := make([]uint32, tokens)
	for i := range prompt {
		prompt[i] = uint32(i * i)
	}
	for _, what := range []string{"first turn:", "after a restart:"} {
		fmt.Println(what)
		if err := turn(ctx, runtime, folder+"/kv", prompt); err != nil {
			log.Panic(err)
		}
	}
	fmt.Println("a policy alone:")
	if err := victims(); err != nil {
		log.Panic(err)
	}
	if err := runtime.Close(); err != nil {
		log.Panic(err)
	}
}
